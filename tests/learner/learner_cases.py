"""Shared cases of the learner's tests: tiny models, batches, ranks in their own processes.

Ranks never run inside the test process: the CPU profile changes torch for the whole process. B
rows, S positions, T response positions, N response tokens of all rows, P tokens of all rows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from matrices import batch_of, flat_of
from preloaded import Process
from torch.profiler import ProfilerActivity, profile

from megatron_rl.batch import Batch, UpdateInputs

# of a config.json, a learner section, a job or its result
Fields = dict[str, Any]
VOCAB = 37  # odd, so that tensor parallelism has to pad it
TINY: Fields = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QWEN3 = {
    **TINY,
    "model_type": "qwen3",
    "head_dim": 32,
    "tie_word_embeddings": True,
    "rope_theta": 5000.0,
}
QWEN2 = {**TINY, "model_type": "qwen2"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA = {**TINY, "model_type": "llama", "rope_scaling": LLAMA3_ROPE}
QWEN3_MOE = {
    **TINY,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MIXTRAL = {
    **TINY,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
ERNIE = {
    **TINY,
    "model_type": "ernie4_5",
    "head_dim": 32,
    "tie_word_embeddings": True,
    "use_bias": False,
}
PHI3 = {**TINY, "model_type": "phi3", "sliding_window": None, "pad_token_id": 0}
FAMILIES = {hf["model_type"]: hf for hf in (QWEN3, QWEN2, LLAMA, QWEN3_MOE, MIXTRAL, ERNIE, PHI3)}
MODELS = {"dense": QWEN3, "experts": QWEN3_MOE}

CHUNKS = {"virtual_pipeline_model_parallel_size": 2}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SEQUENCE = {"sequence_parallel": True}
# of two ranks
LAYOUTS = {
    "tp2": {"tensor_parallel": 2},
    "tp2_sp": {"tensor_parallel": 2, "megatron": SEQUENCE},
    "pp2": {"pipeline_parallel": 2},
    "vp2": {"pipeline_parallel": 2, "megatron": CHUNKS},
    "dp2": {"data_parallel": 2},
}
WHOLE_EXPERTS = {
    "tensor_parallel": 2,
    "expert_parallel": 2,
    "megatron": SEQUENCE | {"expert_tensor_parallel_size": 1},
}
EXPERT_LAYOUTS = {
    "ep2": {"data_parallel": 2, "expert_parallel": 2},
    "tp2_ep2": WHOLE_EXPERTS,
    **{name: LAYOUTS[name] for name in ("tp2_sp", "pp2", "dp2")},
}
PACKS = {"tokens_per_microbatch": 80}  # several, of ragged ends
CP2: Fields = {"context_parallel": 2, **PACKS}
ALL_LAYOUTS = LAYOUTS | EXPERT_LAYOUTS | {"cp2": CP2}


def make_batch(rows: int = 14) -> Batch:
    """Rows of very different lengths; one without an answer, one that nothing trains on."""
    random = torch.Generator().manual_seed(0)
    prompts_B = torch.randint(2, 12, (rows,), generator=random)
    responses_B = torch.randint(1, 14, (rows,), generator=random)
    prompts_B[0] = 40
    responses_B[0] = 30
    responses_B[3] = 0
    lengths_B = prompts_B + responses_B
    tokens_BS = torch.randint(
        1,
        VOCAB,
        (rows, int(lengths_B.max())),
        generator=random,
    )
    sampler_BT = -3 * torch.rand(rows, int(responses_B.max()), generator=random)
    return Batch(
        prompt_lengths_B=prompts_B,
        response_lengths_B=responses_B,
        tokens_P=flat_of(tokens_BS, lengths_B).int(),
        mask_N=(torch.arange(rows) != 5).repeat_interleave(responses_B),
        sampler_logprobs_N=flat_of(sampler_BT, responses_B),
        rewards_B=torch.rand(rows, generator=random),
        groups_B=torch.arange(rows) // 4,
        versions_B=torch.zeros(rows, dtype=torch.int64),
    )


def tokens_of(batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return the tokens of each row, prompt and response."""
    return batch.tokens_P.long().split(batch.lengths_B.tolist())


def with_kept(batch: Batch) -> Batch:
    """The batch, sampled among 1 to 6 tokens at each position."""
    random = torch.Generator().manual_seed(3)
    ids = []
    for tokens_S, prompt in zip(tokens_of(batch), batch.prompt_lengths_B, strict=True):
        for drawn in tokens_S[prompt:]:
            others = torch.randperm(VOCAB, generator=random)[
                : int(torch.randint(6, (), generator=random))
            ]
            ids.append(torch.cat([drawn[None], others[others != drawn]]))
    counts_N = torch.tensor([len(kept) for kept in ids], dtype=torch.int32)
    return replace(batch, kept_counts_N=counts_N, kept_ids_K=torch.cat(ids).int())


def with_top(batch: Batch) -> Batch:
    """The batch with up to 6 top tokens at each token, of those that were kept if there are such;
    none at some tokens.
    """
    random = torch.Generator().manual_seed(4)
    among = [torch.arange(VOCAB)] * batch.responses.tokens
    if batch.kept_ids_K is not None:
        among = list(batch.kept_ids_K.split(batch.kept_counts_N.tolist()))
    ids = []
    for some in among:
        most = int(torch.randint(7, (), generator=random))
        ids.append(some[torch.randperm(len(some), generator=random)[:most]])
    ids_E = torch.cat(ids)
    return replace(
        batch,
        top_counts_N=torch.tensor([len(some) for some in ids], dtype=torch.int16),
        top_ids_E=ids_E.int(),
        top_logprobs_E=(-3 * torch.rand(len(ids_E), generator=random)).half(),
    )


def make_even_batch(rows: int, prompt: int, response: int, vocab: int) -> Batch:
    """Rows of one length."""
    random = torch.Generator().manual_seed(0)
    tokens_BS = torch.randint(1, vocab, (rows, prompt + response), generator=random)
    mask_BT = torch.ones(rows, response, dtype=torch.bool)
    return batch_of(
        mask_BT,
        -1.0 * mask_BT,
        prompt_lengths_B=torch.full((rows,), prompt),
        tokens_P=tokens_BS.flatten().int(),
    )


def _without_answers(batch: Batch, kept: tuple[int, ...] = ()) -> Batch:
    """All answers but those of the rows `kept` are empty."""
    answered_B = torch.isin(torch.arange(len(batch)), torch.tensor(kept))
    answered_N = batch.responses.at_tokens(answered_B)
    responses_B = torch.where(answered_B, batch.response_lengths_B, 0)
    lengths_B = batch.prompt_lengths_B + responses_B
    tokens = [row_S[:length] for row_S, length in zip(tokens_of(batch), lengths_B, strict=True)]
    return replace(
        batch,
        response_lengths_B=responses_B,
        tokens_P=torch.cat(tokens).int(),
        mask_N=batch.mask_N[answered_N],
        sampler_logprobs_N=batch.sampler_logprobs_N[answered_N],
    )


def _trained(batch: Batch, rows: tuple[int, ...]) -> Batch:
    """Only the first token of these rows counts."""
    wanted_B = torch.isin(torch.arange(len(batch)), torch.tensor(rows))
    first_N = batch.responses.at_tokens(wanted_B) & (batch.responses.place_N == 0)
    return replace(batch, mask_N=first_N & batch.mask_N)


def _rows(*rows: int) -> Batch:
    """The first row is much longer than the others, row 3 has no answer, row 5 counts nothing."""
    return make_batch(6).rows(torch.tensor(rows, dtype=torch.int64))


# what a step may be short of
EMPTINESS = {
    "nothing": lambda: _rows(*range(6)),
    "answers": lambda: _without_answers(_rows(*range(6))),
    "all answers but the longest": lambda: _without_answers(_rows(*range(6)), (0,)),
    "all answers but one": lambda: _without_answers(_rows(*range(6)), (4,)),
    "tokens to train on": lambda: _trained(_rows(*range(6)), ()),
    "all tokens but one": lambda: _trained(_rows(*range(6)), (2,)),
    "rows": lambda: _rows(),
    "all rows but one": lambda: _rows(1),
    "all rows but one without an answer": lambda: _rows(3),
}


def make_targets(batch: Batch, anchor_N: torch.Tensor | None) -> UpdateInputs:
    random = torch.Generator().manual_seed(1)
    advantages_B = torch.randn(len(batch), generator=random)
    width = max((1, *batch.response_lengths_B.tolist()))
    weights_BT = torch.rand(len(batch), width, generator=random) + 0.5
    return UpdateInputs(
        prompt_lengths_B=batch.prompt_lengths_B,
        response_lengths_B=batch.response_lengths_B,
        groups_B=batch.groups_B,
        sampler_logprobs_N=batch.sampler_logprobs_N,
        anchor_logprobs_N=anchor_N,
        ref_logprobs_N=None,
        advantages_B=advantages_B,
        weights_N=flat_of(weights_BT, batch.response_lengths_B),
        mask_N=batch.mask_N,
        denominator_mask_N=batch.mask_N,
    )


def update(learner: Any, batch: Batch, targets: UpdateInputs) -> dict[str, float]:
    """An update on a batch that is handed out by the driver."""
    share = learner.split(batch if learner.is_driver else None)
    return learner.update(share, targets.rows(share.own))


def folders_of(
    temporary: Any,
    models: dict[str, Fields],
    dtype: torch.dtype = torch.float32,
    moved: bool = False,
) -> dict[str, Path]:
    """Random models written by transformers. `moved`: with non-trivial norms and biases."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = {}
    for family, hf in models.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf), dtype=dtype)
        for name, parameter in model.named_parameters() if moved else ():
            if "norm" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
        made[family] = temporary.mktemp(family)
        model.save_pretrained(made[family])
    return made


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def logprobs_by(model: Callable[..., Any], batch: Batch | None = None) -> torch.Tensor:
    """Response logprobs by another implementation, with gradients; among kept tokens if given."""
    batch = batch or make_batch()
    kept = iter(())
    if batch.kept_ids_K is not None:
        kept = iter(batch.kept_ids_K.split(batch.kept_counts_N.tolist()))
    rows = []
    for tokens_S, prompt in zip(tokens_of(batch), batch.prompt_lengths_B, strict=True):
        logits_SV = model(tokens_S[None]).logits[0] / 0.8
        for at, ids in zip(range(prompt, len(tokens_S)), kept, strict=False):
            logits_SV[at - 1, ~torch.isin(torch.arange(VOCAB), ids)] = -torch.inf
        logprobs_SV = torch.log_softmax(logits_SV[:-1], -1)
        rows.append(logprobs_SV.gather(1, tokens_S[1:, None]).squeeze(1)[prompt - 1 :])
    return torch.cat(rows)


def transformers_logprobs(folder: Path, batch: Batch | None = None) -> torch.Tensor:
    with torch.no_grad():
        return logprobs_by(reference(folder), batch)


def most_memory(work: Callable[[], object]) -> int:
    """Bytes allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [
        event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


def run_ranks(world: int, jobs: list[Fields], folder: Path, timeout: float = 240.0) -> Fields:
    """Do the jobs one after another on `world` processes; rank 0's results by job name."""
    for number, job in enumerate(jobs):
        job["meeting"] = f"file://{folder}/meeting_{world}_{number}"
    work = folder / f"jobs_{world}.json"
    out = folder / f"results_{world}.json"
    work.write_text(json.dumps(jobs))
    worker = Path(__file__).with_name("learner_worker.py")
    command = [sys.executable, str(worker), str(work), str(out)]
    logs = [folder / f"rank_{world}_{rank}.log" for rank in range(world)]
    ranks = []
    for rank, path in enumerate(logs):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        with path.open("w") as log:
            ranks.append(
                Process("megatron", command, env=env, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(timeout) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes[0] == 0, "\n".join(path.read_text()[-3000:] for path in logs)
    return json.loads(out.read_text())


def run(temporary: Any, *jobs: list[Fields]) -> Fields:
    """Results by name of jobs for 1, 2 and 4 ranks. `temporary`: pytest's folder factory."""
    found = {}
    for ranks, some in zip((1, 2, 4), jobs, strict=False):
        found |= run_ranks(ranks, some, temporary.mktemp("ranks"))
    return found


def tensor(case: Fields | torch.Tensor, key: str = "logprobs") -> torch.Tensor:
    return case if isinstance(case, torch.Tensor) else torch.tensor(case[key])


def close(
    found: Fields | torch.Tensor,
    wanted: Fields | torch.Tensor,
    atol: float,
    key: str = "logprobs",
    rtol: float = 0.0,
) -> None:
    """Compare a tensor of two results."""
    torch.testing.assert_close(
        tensor(found, key),
        tensor(wanted, key),
        rtol=rtol,
        atol=atol,
    )


def same_steps(found: Fields, wanted: Fields, rtol: float, atol: float) -> None:
    """Compare all metrics of the updates of two results."""
    torch.testing.assert_close(found["steps"], wanted["steps"], rtol=rtol, atol=atol)
