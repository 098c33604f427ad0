"""Web dashboard of runs: only reads their files, and needs no running trainer."""
