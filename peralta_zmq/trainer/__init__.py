"""The trainer process: collect groups, take training steps, publish weights, recover."""
