"""Integration of SkyRL-Gym's environments (BaseTextEnv): calls `init(prompt)`, `step(action)`."""

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_rl.environments.environment import Answer, Step, as_messages
from megatron_rl.rewards.functions import for_metrics, imported


class SkyRLEnvironment:
    """A conversation with a BaseTextEnv: `target: module:Class`, or `id`, the name it is registered
    by in skyrl_gym.

    `env_config` and `extras` go to its constructor; the row's columns are among the extras, as
    SkyRL has it.
    """

    def __init__(
        self,
        target: str | None = None,
        id: str | None = None,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> None:
        if (target is None) == (id is None):
            raise ValueError("give either target, module:Class, or id, a name that skyrl_gym knows")
        make = imported(target or "skyrl_gym:make")
        self._make = partial(make, id) if id else make
        self._config = dict(env_config or {})
        self._extras = dict(extras or {})
        self._environment: Any = None

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        extras = {name: value for name, value in row.items() if name != "prompt"} | self._extras
        self._environment = self._make(env_config=self._config, extras=copy.deepcopy(extras))
        messages, _ = self._environment.init(as_messages(row["prompt"]))
        return messages

    async def step(self, answer: Answer) -> Step:
        found = self._environment.step(answer.text)
        if inspect.isawaitable(found):
            found = await found
        done = bool(found["done"])
        numbers = for_metrics(found.get("metadata"))
        if done:
            numbers |= for_metrics(self._environment.get_metrics())
        return Step(found["observations"], float(found["reward"]), done, numbers)

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()
