<<<<<<< HEAD
"""Learner weights into the sampler: mapping, quantization, transport, verification."""
=======
"""Learner shards -> live sampler weights: mapping, quantization, manifest, transports and the receiving engine."""
>>>>>>> sampler
