"""Integrations of other projects' environments, each with a small object of its protocol."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.environments.environment import load
from megatron_rl.environments.worker import Conversation
from megatron_rl.rewards.functions import for_metrics

ADAPTERS = "megatron_rl.apps.integrations"
HERE = "adapted_parts"  # this module's objects, as a recipe names them


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


class Played:
    """An environment process's conversation, in this process."""

    def __init__(self, name: str, row: dict[str, Any], **settings: Any) -> None:
        self._conversation = Conversation(load(f"{ADAPTERS}.{name}"), settings)
        begun = self.ask("reset", row=row)
        self.messages = begun["messages"]
        self.tools = begun["tools"]

    def ask(self, do: str, **more: Any) -> Any:
        return self._conversation._answer({"do": do, **more})

    def say(self, text: str) -> Any:
        self._turn = getattr(self, "_turn", -1) + 1
        return self.ask("step", answer={"text": text, "content": text, "turn": self._turn})

    def call(self, name: str, **arguments: Any) -> str:
        return self.ask("tool", name=name, arguments=arguments)["text"]

    def close(self) -> float | None:
        return self.ask("close")["reward"]


class Counter:
    """A TRL environment."""

    def reset(self, **row):
        self.goal = row["goal"]
        self.count = 0
        return f" Goal: {row['goal']}."

    def add(self, amount: int) -> int:
        """Adds to the count.

        Args:
            amount: How much.
        """
        self.count += amount
        return self.count

    def _hidden(self): ...

    def get_reward(self):
        return float(self.count == self.goal)


async def double(x: int) -> dict[str, int]:
    """Doubles a number.

    Args:
        x: The number.
    """
    return {"double": 2 * x}


def closeness(environments, completions, goal, **columns):
    assert completions == [[{"role": "assistant", "content": "done"}]]
    assert goal == [5]
    return [1 / (1 + abs(one.goal - one.count)) for one in environments]


def test_trl() -> None:
    row = {"prompt": [{"role": "user", "content": "Count."}], "goal": 5}
    settings = {
        "target": f"{HERE}:Counter",
        "tools": [f"{HERE}:double"],
        "reward": f"{HERE}:closeness",
    }
    played = Played("trl:TRLEnvironment", row, **settings)
    assert played.messages == [{"role": "user", "content": "Count. Goal: 5."}]
    assert [one["function"]["name"] for one in played.tools] == ["double", "add"]
    parameters = played.tools[1]["function"]["parameters"]
    assert parameters["properties"]["amount"]["description"] == "How much."
    assert played.call("add", amount=2) == "2"
    assert played.call("double", x=4) == "{'double': 8}"
    assert "unexpected keyword" in played.call("add", much=1)
    assert played.call("add", amount=2) == "4"
    assert played.say("done")["done"]
    assert played.close() == 0.0 + 0.5


class Instance:
    """An OpenRLHF agent."""

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        import torch

        seen = states["observation_text"]
        right = states["label"] in states["action_text"]
        reward = torch.tensor([float(right)])
        return {
            "rewards": reward,
            "scores": reward,
            "environment_feedback": f"\n\nHuman: [{len(seen)}] No.\n</s>\n\nAssistant: ",
            "done": right,
            "extra_logs": {"n": reward},
        }


def test_openrlhf() -> None:
    row = {"prompt": "12 + 30?", "label": "42"}
    played = Played(
        "openrlhf:OpenRLHFEnvironment",
        row,
        target=f"{HERE}:Instance",
        feedback=r"Human: (.*?)\s*</s>",
    )
    assert played.messages == [{"role": "user", "content": "12 + 30?"}]
    assert played.say("41")["messages"] == [{"role": "user", "content": "[8] No."}]
    step = played.say("42")
    assert (step["done"], step["reward"], step["numbers"]) == (True, 1.0, {"score": 1.0, "n": 1.0})


SCHEMA = {"type": "function", "function": {"name": "check", "parameters": {"type": "object"}}}


class Check:
    """A tool of verl's."""

    name = "check"

    def __init__(self, config, tool_schema):
        self.made = {}
        self.count = 0

    def get_openai_tool_schema(self):
        return SimpleNamespace(model_dump=lambda **_: SCHEMA)

    async def create(self, create_kwargs):
        name = f"i{self.count}"
        self.count += 1
        self.made[name] = {"truth": create_kwargs["truth"], "best": 0.0}
        return name, None

    async def execute(self, instance_id, parameters):
        made = self.made[instance_id]
        right = parameters["answer"] == made["truth"]
        made["best"] = float(right)
        said = SimpleNamespace(text=f"{instance_id} {right}", image=None, video=None)
        return said, -0.05, {"asked": 1}

    async def calc_reward(self, instance_id):
        return self.made[instance_id]["best"]

    async def release(self, instance_id):
        del self.made[instance_id]


@pytest.mark.parametrize(
    ("instance", "said", "reward"), [("call", "i1 True", -0.1), ("conversation", "i0 True", 0.9)]
)
def test_verl(instance: str, said: str, reward: float) -> None:
    row = {
        "prompt": "12 + 30?",
        "extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"truth": "42"}}}},
    }
    tools = [{"class_name": f"{HERE}.Check", "config": {"type": "native"}}]
    played = Played("verl:VerlEnvironment", row, tools=tools, instance=instance, rewarded=True)
    assert played.tools == [SCHEMA]
    assert played.call("check", answer="41") == "i0 False"
    assert played.call("check", answer="42") == said
    assert played.say("42")["numbers"] == {"asked": 1.0, "tool_reward": -0.1}
    assert played.close() == pytest.approx(reward)


class Text:
    """An environment of SkyRL-Gym's."""

    def __init__(self, env_config, extras):
        self.truth = extras["reward_spec"]["ground_truth"]
        self.turns = 0
        assert env_config == {"k": 1}
        assert extras["max_turns"] == 2

    def init(self, prompt):
        return [{"role": "system", "content": "Think."}, *prompt], {}

    def step(self, action):
        self.turns += 1
        done = action == self.truth
        return {
            "observations": [] if done else [{"role": "user", "content": "Again."}],
            "reward": float(done),
            "done": done,
            "metadata": {"m": self.turns, "s": "x"},
        }

    def get_metrics(self):
        return {"steps": self.turns}

    def close(self): ...


def test_skyrl() -> None:
    row = {"prompt": "12 + 30?", "reward_spec": {"ground_truth": "42"}}
    settings = {"env_config": {"k": 1}, "extras": {"max_turns": 2}}
    played = Played("skyrl:SkyRLEnvironment", row, target=f"{HERE}:Text", **settings)
    assert [one["role"] for one in played.messages] == ["system", "user"]
    assert played.say("41")["messages"] == [{"role": "user", "content": "Again."}]
    step = played.say("42")
    assert step["done"]
    assert step["reward"] == 1.0
    assert step["numbers"] == {"m": 2.0, "steps": 2.0}


async def bare(base_url, row, *, bonus):
    return row["worth"] + bonus


def test_an_agents_settings_reach_it() -> None:
    conversation = Conversation(load(f"{HERE}:bare"), {"bonus": 0.5})
    asked = {"do": "run", "base_url": "http://x", "key": "k", "row": {"worth": 1.0}}
    assert conversation._answer(asked)["reward"] == 1.5


VERIFIERS = """
class Environment:
    def get_dataset(self): return [{"prompt": "12 + 30?", "answer": "42", "example_id": 0}]
    async def run_rollout(self, input, client, model, sampling_args):
        print("to be kept out of the replies", client.api_base_url)
        return {"reward": float(input["answer"]), "metrics": {"n": 1.0}, "error": None}
def load_environment(name, **arguments):
    assert (name, arguments) == ("sums", {"hard": True})
    return Environment()
"""


def test_verifiers_in_another_interpreter(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text(VERIFIERS)
    types = "from types import SimpleNamespace\nClientConfig = SimpleNamespace\n"
    (tmp_path / "verifiers" / "types.py").write_text(types)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    make = load(f"{ADAPTERS}.verifiers:Agent").agent
    assert make is not None
    playing = make(name="sums", arguments={"hard": True}, python=sys.executable)
    rows = (
        {"index": 0},
        {"prompt": "", "answer": "7"},
        {"prompt": "", "answer": "x"},
    )

    async def run() -> list[Any]:
        asked = [playing("http://127.0.0.1:1/v1", row) for row in rows]
        return await asyncio.gather(*asked, return_exceptions=True)

    *found, error = asyncio.run(run())
    assert found == [{"reward": 42.0, "n": 1.0}, {"reward": 7.0, "n": 1.0}]
    assert "ValueError" in str(error)


def test_numbers_of_other_projects_for_metrics() -> None:
    assert for_metrics({"a": 1, "b": True, "c": "1", "d": None, "e": [1]}) == {"a": 1.0, "b": 1.0}
