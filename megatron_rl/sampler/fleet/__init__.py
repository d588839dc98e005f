"""A fleet of vLLM servers over HTTP, seen from the run."""
