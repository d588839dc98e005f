"""Conversations with live engines, and the learner's logprobs of each turn from a single pass.

Writes JSON. A process of its own, in which the learner may change torch.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from budget_cases import probed
from environments.chats import APPENDS, folder_of
from safetensors.torch import save_file
from tiny_engine import Live, TinyModel, make_config, make_settings, startable
from transformers import Qwen3Config

from megatron_rl.batch import Batch, collate
from megatron_rl.config.schema import EnvironmentSection, Format, Forward, LearnerSection
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.environments.session import PolicyClient, Rules
from megatron_rl.environments.sessions import rollouts
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.modules import cpu  # noqa: F401 - before megatron
from megatron_rl.models.model import Model
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Prompt, Rollout, SamplingParams, Scored, SessionTurn

CONTEXT = 320
SESSIONS = 3
TURNS = 4
SEED = 3
REWRITES = 2  # the session that changes what it has said, and so forks at every turn
# format, workers of the engine, and whether it keeps prefixes
CASES = [
    (Format.none, 1, True),
    (Format.none, 1, False),
    (Format.none, 2, True),
    (Format.int8, 1, True),
    (Format.int8, 1, False),
    (Format.int8, 2, True),
    (Format.fp8, 1, True),
]


def write_model(folder: Path) -> tuple[TinyModel, FolderTokenizer]:
    tokenizer = FolderTokenizer(folder_of(folder, APPENDS))
    hf = Qwen3Config(
        vocab_size=420,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(tokenizer.stop_token_ids),
        architectures=["Qwen3ForCausalLM"],
    )
    hf.save_pretrained(folder)
    model = TinyModel(folder, hf)
    save_file(model.weights(SEED), folder / "model.safetensors", {"format": "pt"})
    return model, tokenizer


async def converse(live: Live, tokenizer: FolderTokenizer) -> list[Rollout]:
    """Rows of sessions that go on side by side; what they say is nonsense."""
    params = SamplingParams(samples=1, max_tokens=16, top_logprobs=4, top_mass=0.9)
    asking = live.sampler.turns(params, patient=True)
    rules = Rules(EnvironmentSection(name="none:needed"), 16, CONTEXT, {}, None)

    async def session(number: int) -> list[Rollout]:
        policy = PolicyClient(
            asking, tokenizer, rules, lambda turn: 100 * number + turn, str(number)
        )
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "What is 12 + 30? " + "it is not " * number}
        ]
        for _ in range(TURNS):
            response = await policy.answer(messages, ())
            completion = response.completion
            said = response.message
            policy.transcript.turns.append(
                SessionTurn(len(completion.token_ids), completion.finish_reason)
            )
            said["content"] += "!" * (number == REWRITES)
            messages = [*messages, said, {"role": "user", "content": "Not yet. Again."}]
        prompt = Prompt(number, (1,), "", {})
        return rollouts(
            policy.transcript, prompt, number, 0, rules.section, live.sampler.policy_version
        )

    with closing(asking):
        return [
            row for rows in await asyncio.gather(*map(session, range(SESSIONS))) for row in rows
        ]


def by_turn(batch: Batch, logprobs_N: Any) -> Iterator[dict[str, Any]]:
    assert batch.turns_N is not None
    for turn in range(TURNS):
        of_N = batch.mask_N & (batch.turns_N == turn)
        d = (logprobs_N - batch.sampler_logprobs_N)[of_N].abs()
        yield {"tokens": int(of_N.sum()), "mean": float(d.mean())}


def case(folder: Path, format: Format, workers: int, cached: bool) -> dict[str, Any]:
    folder.mkdir()
    model, tokenizer = write_model(folder / "hf")
    vllm = {
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 100 << 20,
        "block_size": 32,
        "enable_prefix_caching": cached,
    }
    settings = replace(
        make_settings(format, vllm=vllm, tensor_parallel=workers), max_tokens=CONTEXT
    )
    with startable(), Sampler(settings, model.folder, folder) as sampler:
        live = Live(sampler, model, format, folder)
        live.update(SEED)
        rows = asyncio.run(converse(live, tokenizer))
        prefilled = sampler.health()["prefilled"]
    batch = collate([Scored(one, reward=0.0) for one in rows])
    assert batch.top_counts_N is not None
    found: dict[str, Any] = {
        "rows": len(rows),
        "prefilled": prefilled,
        "top": bool(((batch.top_counts_N > 0) == (batch.turns_N >= 0)).all()),
        "most": int(batch.top_counts_N.max()),
    }
    for forward in Forward if format == Format.int8 else (Forward.bf16,):
        section = LearnerSection(forward=forward)
        config = replace(make_config(format), learner=section)
        with closing(Learner(Model.read(model.folder, section), config)) as learner:
            learner.load_hf(model.folder)
            turns = list(by_turn(batch, learner.logprobs(batch)))
            found[forward] = {"turns": turns, **probed(learner, batch, format)}
    return found


def main() -> None:
    out = Path(sys.argv[1])
    found = [case(out / str(number), *given) for number, given in enumerate(CASES)]
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
