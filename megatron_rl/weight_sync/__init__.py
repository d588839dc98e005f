"""Weight sync from learner shards to the live sampler: mapping, quantization, manifest, transports
and the receiving engine.
"""
