"""One module per project whose correction settings `megatron_rl.workshop.translation.translate`
reads.
"""
