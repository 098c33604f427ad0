"""What people would use instead, each a program of its own in an environment of its own.

A peer takes one JSON object (`Task`) as its argument and prints one JSON object a line: first
`{"begun": TIME}` when everything is loaded and training begins, then for each optimizer step
`{"step", "time", "reward", "bytes", "seconds", ...}`, the last of its parts by name. It ends when
it is told to. Knows nothing of ours but the data and the reward.
"""
