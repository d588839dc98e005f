"""Names, sizes and places of weights."""
