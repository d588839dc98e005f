"""Recipes for reinforcement learning of language models."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rl.config.load import load as load_config
    from megatron_rl.environments.environment import Answer, Environment, Step
    from megatron_rl.rewards.functions import RewardFunction

__all__ = ["Answer", "Environment", "RewardFunction", "Step", "load_config"]
# read as text by pyproject.toml and tools/offline/unpack.sh
__version__ = "0.2.0"

_PLACES = {
    "Answer": "environments.environment:Answer",
    "Environment": "environments.environment:Environment",
    "RewardFunction": "rewards.functions:RewardFunction",
    "Step": "environments.environment:Step",
    "load_config": "config.load:load",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: a process of the package imports only its own part."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(f"{__name__}.{_PLACES[name]}")
