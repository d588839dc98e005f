"""Policy losses and their reductions. Pure. Read `policy_loss.py` first; `table.py` is the list of
losses.
"""
