"""Learner weights into the sampler: mapping, quantization, transport, verification."""
