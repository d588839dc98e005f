"""The record of a run: its directory, metrics, status, console and trackers."""
