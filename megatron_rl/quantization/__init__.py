"""What a weight format is: which layers, the quantizers, smoothing, scales."""
