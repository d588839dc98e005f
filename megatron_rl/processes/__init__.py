"""Tools for a run's processes: start and end, messages between them, signs of life, the machine
that they run on.
"""
