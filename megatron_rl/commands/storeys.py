"""Optional imports of `megatron_rl.workshop`, by name: commands do without it where it is not installed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def workshop(module: str) -> ModuleType | None:
    """A module of megatron_rl/workshop/; None where there is no workshop."""
    return import_module(f"megatron_rl.workshop.{module}") if find_spec("megatron_rl.workshop") else None
