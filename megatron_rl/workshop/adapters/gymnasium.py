"""Adapters for Gymnasium's environments (observations told as text) and TextArena's games, as a
run's environment.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.environments.environment import Answer, Step
from megatron_rl.rewards.functions import for_metrics, imported
from megatron_rl.workshop.adapters import opening


class Environment:
    """A conversation with a gymnasium environment: `target` and its `arguments`, such as
    `gymnasium:make` and an id.

    `action: module:function` makes an action of an answer's text, and `observation:
    module:function` a text of an observation (`str` without one); ValueError of an action is told
    to the policy, who may try again.
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
        observation, _ = self._environment.reset(**_seeded(row, self._seed))
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


class TextArena:
    """A conversation with a game of TextArena's, `arguments: {env_id: ...}`; the policy is player
    0.

    Others play as `opponents: [module:function, ...]` does, which is given what they see, and
    returns their action.
    """

    def __init__(
        self,
        target: str = "textarena:make",
        arguments: Mapping[str, Any] | None = None,
        opponents: Sequence[str] = (),
        seed: str = "seed",
    ) -> None:
        self._environment = imported(target)(**(arguments or {}))
        self._seed = seed
        self._opponents = [imported(name) for name in opponents]
        self._seen = ""

    def reset(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._environment.reset(num_players=1 + len(self._opponents), **_seeded(row, self._seed))
        return opening(row.get("prompt", ""), self._turn()[1])

    def step(self, answer: Answer) -> Step:
        done, info = self._environment.step(action=answer.content)
        said = ""
        if not done:
            done, said = self._turn()
        if not done:
            return Step(said, numbers=for_metrics(info))
        rewards, _ = self._environment.close()
        return Step((), float((rewards or {}).get(0, 0.0)), True, for_metrics(info))

    def _turn(self) -> tuple[bool, str]:
        """Whether the game has ended before it is the policy's turn, and what it sees then."""
        while True:
            player, seen = self._environment.get_observation()
            if player == 0:
                if isinstance(seen, str):
                    text = seen
                else:
                    text = "\n".join(one[1] for one in seen)
                # its wrappers say everything each time
                new = text.removeprefix(self._seen)
                self._seen = text
                return False, new.strip() or text
            if self._environment.step(action=self._opponents[player - 1](seen))[0]:
                return True, ""


def _seeded(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    if row.get(name) is None:
        return {}
    return {"seed": int(row[name])}
