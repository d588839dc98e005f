"""Published agent frameworks, each in an environment of its own, at the gateway of a live engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from environments.chats import APPENDS, ROW, SPECIAL, folder_of
from environments.scripted_policy import call
from preloaded import forking
from safetensors.torch import save_file
from tiny_engine import make_settings
from tokenizers import AddedToken, Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_rl.apps.integrations.verifiers import Agent
from megatron_rl.config.schema import EnvironmentSection
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.environments.agent import Gateway
from megatron_rl.environments.session import PolicyClient, Rules
from megatron_rl.processes.threads import EventLoopThread
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import SamplingParams

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
HERE = Path(__file__).parent / "published"
UV = Path(sys.executable).with_name("uv")
CONTEXT = 2048
CALL = call("add", a=12, b=30)
ANSWER = "42"
PACKAGES = {
    "agents_sdk": ("openai-agents==0.24.0",),
    "langgraph_agent": ("langgraph==1.2.24", "langchain-openai==1.7.4"),
    "verifiers": ("verifiers==0.4.0",),
}


def write_model(folder: Path) -> FolderTokenizer:
    """Write a model that begins every response with the call or the answer, at equal odds, and
    ends it there: each token's successors depend on that token alone.
    """
    folder_of(folder, APPENDS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in (CALL, ANSWER)])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    found = FolderTokenizer(folder)
    hf = Qwen3Config(
        vocab_size=size,
        hidden_size=512,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=list(found.stop_token_ids),
        architectures=["Qwen3ForCausalLM"],
    )
    hf.save_pretrained(folder)
    weights = {
        name: torch.zeros_like(one) for name, one in Qwen3ForCausalLM(hf).state_dict().items()
    }
    weights["model.embed_tokens.weight"].fill_diagonal_(1.0)
    weights["model.norm.weight"].fill_(1.0)
    first = [tokenizer.token_to_id(CALL), tokenizer.token_to_id(ANSWER)]
    weights["lm_head.weight"][first, found.encode("\n")[0]] = 1.0
    weights["lm_head.weight"][tokenizer.token_to_id(SPECIAL[1]), first] = 1.0
    bfloat16 = {name: one.bfloat16() for name, one in weights.items()}
    save_file(bfloat16, folder / "model.safetensors", {"format": "pt"})
    return found


class Served:
    """Gateway of a live engine."""

    def __init__(self, sampler: Sampler, tokenizer: FolderTokenizer) -> None:
        self.tokenizer = tokenizer
        stops = tokenizer.stop_token_ids
        params = SamplingParams(samples=1, max_tokens=16, stop_token_ids=stops)
        self.turns = sampler.turns(params, patient=True)
        self.loop = EventLoopThread("gateway", lambda: RuntimeError("closed"))
        self.gateway = Gateway()
        self.loop.call(self.gateway.open())
        section = EnvironmentSection(name="none:needed", max_turns=8)
        self.rules = Rules(section, 16, CONTEXT, {}, "hermes")
        # seeds that begin with the call, and with the answer
        texts = {seed: self._sampled(seed) for seed in range(20)}
        first = next(seed for seed, text in texts.items() if text.startswith(CALL))
        last = next(seed for seed, text in texts.items() if text.startswith(ANSWER))
        self.seeds = [first, last]

    def _sampled(self, seed: int) -> str:
        ids = self.tokenizer.encode("\n")
        asked = self.turns.ask(ids, max_tokens=16, seed=seed, key="0")
        return self.tokenizer.decode_all(asyncio.run(asked).token_ids)

    def conversation(self) -> SimpleNamespace:
        policy = PolicyClient(self.turns, self.tokenizer, self.rules, self.seeds.__getitem__, "0")
        name, url, key = self.gateway.begin(policy)
        return SimpleNamespace(policy=policy, name=name, url=url, key=key)

    def close(self) -> None:
        self.loop.call(self.gateway.close())
        self.loop.stop()
        self.turns.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("engine")
    tokenizer = write_model(folder / "hf")
    vllm = {
        "model": str(folder / "hf"),
        "load_format": "safetensors",
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 100 << 20,
    }
    settings = replace(make_settings(vllm=vllm), max_tokens=CONTEXT)
    with (
        forking(),
        Sampler(settings, folder / "hf", folder) as sampler,
        closing(Served(sampler, tokenizer)) as served,
    ):
        yield served


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Interpreters of the packages' own environments, made when first used."""
    return {"folder": str(tmp_path_factory.mktemp("published"))}


def python_of(pythons: dict[str, str], name: str) -> str:
    if name not in pythons:
        python = f"{pythons['folder']}/{name}/bin/python"
        subprocess.run(
            [UV, "venv", "-q", "-p", sys.executable, Path(python).parents[1]], check=True
        )
        subprocess.run([UV, "pip", "install", "-q", "-p", python, *PACKAGES[name]], check=True)
        pythons[name] = python
    return pythons[name]


def check(served: Served, policy: Any) -> None:
    """Both turns are in one row, with the tokens and logprobs that were sampled."""
    served.loop.call(policy.apart(policy.leave_unread))
    (row,) = policy.transcript.conversation.rows(ROW)
    sampled = [one for one, kept in zip(row.token_ids, row.loss_mask, strict=True) if kept]
    end = SPECIAL[1]
    assert served.tokenizer.decode_all(sampled) == f"{CALL}{end}{ANSWER}{end}"
    assert [turn.tool_calls for turn in policy.transcript.turns] == [1, 0]
    logprobs = [one for one, kept in zip(row.logprobs, row.loss_mask, strict=True) if kept]
    assert logprobs == pytest.approx([-0.6931, 0.0, -0.6931, 0.0], abs=0.02)
    assert "It is 42." in served.tokenizer.decode_all(row.token_ids)


@pytest.mark.parametrize("api", ["chat", "chat stream", "responses", "responses stream"])
@pytest.mark.parametrize("name", ["agents_sdk", "langgraph_agent"])
def test_agents_run_unchanged(served: Served, pythons: dict[str, str], name: str, api: str) -> None:
    asked = served.conversation()
    environment = {"OPENAI_BASE_URL": asked.url, "OPENAI_API_KEY": asked.key}
    done = subprocess.run(
        [python_of(pythons, name), HERE / f"{name}.py", *api.split()],
        env=environment | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip() == ANSWER, done.stderr[-3000:]
    check(served, asked.policy)


def test_verifiers_runs_unchanged(
    served: Served, pythons: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = served.conversation()
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("PATH", f"{UV.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OPENAI_API_KEY", asked.key)
    agent = Agent(
        "adding_v1",
        {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}},
        python_of(pythons, "verifiers"),
    )
    found = asyncio.run(agent.run(asked.url, {"index": 0}))
    assert found["reward"] == 1.0
    check(served, asked.policy)
