"""Policy losses and their reductions. Pure. Start with `policy_loss.py`; the list is `table.py`."""
