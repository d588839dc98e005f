"""Check of a job's nodes against the needs of its recipe, before models load."""
