"""A fleet of vLLM servers over HTTP, seen from the run. A replica is a server as the fleet knows it."""
