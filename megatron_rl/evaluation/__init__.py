"""How good is a policy? Held-out sets in a run, and models on their own."""
