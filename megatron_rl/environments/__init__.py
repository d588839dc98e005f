"""Environments: conversations of several turns between the policy and tools, simulators, or an
agent of the user's.
"""
