"""What can be known before a job is queued."""
