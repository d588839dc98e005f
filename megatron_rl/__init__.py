"""Recipes for reinforcement learning of language models."""

# read as text by pyproject.toml and tools/offline/unpack.sh
__version__ = "0.2.0"
