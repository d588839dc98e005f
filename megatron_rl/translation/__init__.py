"""One module per project whose correction settings `megatron_rl.translation.translate` reads."""
