"""Checks and estimates made before a job is queued."""
