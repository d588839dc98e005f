"""The record of a run: its directory, metrics, status, console and W&B."""
