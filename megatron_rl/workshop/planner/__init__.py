"""What a recipe will need of a machine: memory, time, GPUs. Arithmetic on sizes alone: no torch, no weights, no GPU."""
