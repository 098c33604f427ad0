"""Monitoring of a run: log files, terminal, verdict, trackers and dashboard."""
