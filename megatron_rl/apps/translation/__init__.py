"""Readers of other projects' correction settings, a module per project."""
