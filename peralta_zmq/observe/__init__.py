"""Logging, metrics and monitoring of a run: run log, terminal, verdict, trackers, dashboard."""
