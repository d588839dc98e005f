"""(p, mu, mask) -> weights, mask, metrics. Pure. `correction.py` is the file to read first."""
