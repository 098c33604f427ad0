"""The trainer process: collect rollouts, take training steps, publish weights."""
