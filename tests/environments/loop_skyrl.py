"""SkyRL's side of loops.py, in a process that imports nothing of this project: its
SkyRLGymGenerator, by its defaults.

The answers stand in for the client of its inference engines.
"""

from __future__ import annotations

from typing import Any

from loop_parts import Lines, each, played


class Scripted:
    """In the inference client's place; a session's name is its conversation's number."""

    def __init__(self, script: dict[str, Any], tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.turns = [
            iter(zip(one["answers"], one["logprobs"], strict=True))
            for one in script["conversations"]
        ]
        self.stops = tokenizer.convert_tokens_to_ids(script["stops"])

    async def generate(self, asked: Any, model: Any = None) -> dict[str, Any]:
        (session,) = asked["session_ids"]
        token_ids, logprobs = next(self.turns[int(session.split("_")[0])])
        return {
            "responses": [self.tokenizer.decode(token_ids, skip_special_tokens=True)],
            "response_ids": [list(token_ids)],
            "response_logprobs": [list(logprobs)],
            "stop_reasons": ["stop" if token_ids[-1] in self.stops else "length"],
        }

    async def finish_session(self, session: str) -> None: ...


def play(script: dict[str, Any]) -> list[dict[str, Any]]:
    import skyrl_gym
    from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
    from skyrl_gym.envs.base_text_env import BaseTextEnv
    from skyrl_gym.envs.registration import registry
    from transformers import AutoTokenizer

    class Environment(Lines, BaseTextEnv):
        pass

    if "lines" not in registry:
        skyrl_gym.register(id="lines", entry_point=Environment)
    tokenizer = AutoTokenizer.from_pretrained(script["folder"])
    config = GeneratorConfig(
        max_turns=script["turns"],
        max_input_length=script["most_tokens"],
        chat_template_kwargs=script["options"],
    )
    generator = SkyRLGymGenerator(config, SkyRLGymConfig(), Scripted(script, tokenizer), tokenizer)

    def one(number: int, conversation: dict[str, Any]) -> Any:
        return generator.agent_loop(
            conversation["prompt"],
            "lines",
            {"said": conversation["said"]},
            script["most_tokens"],
            script["most_tokens"],
            sampling_params={"logprobs": 1},
            trajectory_id=TrajectoryID(str(number), 0),
        )

    return each(script, one, "prompt_ids response_ids loss_mask rollout_logprobs")


if __name__ == "__main__":
    played(play)
