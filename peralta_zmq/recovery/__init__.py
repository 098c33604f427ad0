"""What lets a killed trainer go on: `journal` (accepted groups) and `checkpoint` (a snapshot)."""
