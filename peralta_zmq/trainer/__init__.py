"""The trainer process: collect groups, take optimizer steps, publish weights, recover."""
