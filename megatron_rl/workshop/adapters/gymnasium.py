"""Adapter for Gymnasium's environments as a run's environment; observations are sent as text."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.environments.environment import Answer, Step
from megatron_rl.rewards.functions import for_metrics, imported
from megatron_rl.workshop.adapters import opening


class Environment:
    """A conversation with a gymnasium environment: `target` and its `arguments`, such as
    `gymnasium:make` and an id.

    `action: module:function` makes an action of an answer's text, and `observation:
    module:function` a text of an observation (`str` without one). The policy gets the ValueError of
    an action as its next observation.
    """

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any] | None = None,
        action: str | None = None,
        observation: str | None = None,
        seed: str = "seed",
    ) -> None:
        self._environment = imported(target)(**(arguments or {}))
        self._seed = seed
        self._action = imported(action) if action else str
        self._text = imported(observation) if observation else str

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        seed = row.get(self._seed)
        observation, _ = self._environment.reset(seed=None if seed is None else int(seed))
        return opening(row.get("prompt", ""), self._text(observation))

    def step(self, answer: Answer) -> Step:
        try:
            action = self._action(answer.content)
        except ValueError as error:
            return Step(f"error: {error}", 0.0)
        observation, reward, terminated, truncated, info = self._environment.step(action)
        numbers = for_metrics(info) | {"truncated": float(truncated)}
        return Step(self._text(observation), float(reward), bool(terminated or truncated), numbers)

    def close(self) -> None:
        if hasattr(self._environment, "close"):
            self._environment.close()
