"""The needs of a recipe: memory, time, GPUs. Arithmetic on sizes alone: no torch, no weights, no
GPU.
"""
