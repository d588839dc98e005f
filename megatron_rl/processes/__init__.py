"""Process utilities of a run: start and end, messages, heartbeats, properties of the machine."""
