"""One script per claim, each measuring us and the peer side by side in one run."""
