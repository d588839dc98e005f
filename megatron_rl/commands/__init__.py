"""What `megatron-rl` can be asked for: each module adds one command, and imports its work when it is asked."""
