"""One module per group of projects whose correction settings `megatron_rl.translate` reads."""
