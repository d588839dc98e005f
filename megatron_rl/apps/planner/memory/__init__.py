"""Bytes of the learner and of an engine, on a GPU or in a process of a host."""
