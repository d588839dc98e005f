"""Rows of data sets to prompts."""
