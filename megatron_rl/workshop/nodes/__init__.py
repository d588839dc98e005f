"""Nodes of a job against the needs of its recipe: looked at by each, judged by the first, before
models load.
"""
