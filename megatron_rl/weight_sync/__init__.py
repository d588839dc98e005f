"""Learner shards -> live sampler weights: mapping, quantization, manifest, transports and the
receiving engine.
"""
