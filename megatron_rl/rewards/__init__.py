"""Rollout -> score. Reward functions run in worker processes of their own, under a deadline."""
