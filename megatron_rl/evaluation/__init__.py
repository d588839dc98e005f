"""Evaluation of policies: held-out sets in a run, and models on their own."""
