"""Environments: conversations of the policy with tools, simulators, or an agent of the user's."""
