"""Alternatives to this project, each a program in a separate environment.

The argument of a peer is one JSON object (`Task`). It prints one JSON object per line: first
`{"started": true, "time"}` when everything is loaded and training starts, then for each optimizer
step `{"step", "time", "reward", "bytes", ...}`. It runs until it is killed or all steps are done.
From this project it imports only the task.
"""
