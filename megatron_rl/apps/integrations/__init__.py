"""Integrations of other projects' environments, unchanged: `environment.name` names their class.

The user's own code is named in `environment.settings`: `target: package.module:Class` and its
arguments. docs/guides/environments.md lists the versions tried.
"""
