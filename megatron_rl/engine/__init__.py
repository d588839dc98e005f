"""What runs inside vLLM's processes."""
