"""Weight formats: quantized layers, quantizers, smoothing, scales."""
