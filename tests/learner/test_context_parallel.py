"""Ranks that share sequences: the logprobs, losses and gradients of one rank alone.

Choices of experts and checkpoints: test_router_replay.py, test_state.py.
"""

from dataclasses import fields

import learner_cases as cases
import pytest
import torch
from learner_cases import Fields
from routing_worker import routed_batch

from megatron_rl.learner.modules.context import split  # before megatron

from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank  # isort: skip

from megatron_rl.learner.modules.packing import Pack, pack

pytestmark = pytest.mark.ranks
CP2 = cases.CP2
SP = {**CP2, **cases.LAYOUTS["tp2_sp"]}
# name -> (ranks, config.json, learner section, what else the job says)
CASES = {
    "cp2": (2, cases.QWEN3, CP2, {}),
    "cp2_recompute": (2, cases.LLAMA, {**CP2, "megatron": cases.RECOMPUTE}, {}),
    "cp2_kept": (2, cases.QWEN3, CP2, {"kept": True}),
    "cp2_sequences": (2, cases.QWEN3, CP2, {"loss": "gspo"}),
    "cp2_entropy": (2, cases.QWEN3, CP2, {"entropy_coef": 0.1}),
    "cp2_experts": (2, cases.QWEN3_MOE, CP2, {}),
    "cp2_ep2": (2, cases.QWEN3_MOE, {**CP2, "expert_parallel": 2}, {}),
    "cp4": (4, cases.QWEN3, {**CP2, "context_parallel": 4}, {}),
    "cp2_tp2_sp": (4, cases.QWEN3, SP, {}),
    "cp2_pp2": (4, cases.QWEN3, {**CP2, "pipeline_parallel": 2}, {}),
    "cp2_dp2": (4, cases.QWEN3, {**CP2, "data_parallel": 2}, {}),
    "cp2_ep2_dp2": (
        4,
        cases.QWEN3_MOE,
        {**CP2, "expert_parallel": 2, "data_parallel": 2},
        {},
    ),
    "cp2_ep2_tp2": (4, cases.QWEN3_MOE, {**CP2, **cases.WHOLE_EXPERTS}, {}),
}
# the first case that is the same on one rank
ALONE = {
    name: next(each for each, other in CASES.items() if other[1::2] == case[1::2])
    for name, case in CASES.items()
}
STEPS = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    jobs = {1: [], 2: [], 4: []}
    for name, (ranks, hf, layout, more) in CASES.items():
        jobs[ranks].append(
            {
                "name": name,
                "layout": layout,
                "hf": hf,
                "steps": STEPS,
                **more,
            }
        )
    for name in {*ALONE.values()}:
        jobs[1].append(
            {
                "name": f"{name} alone",
                "hf": CASES[name][1],
                "steps": STEPS,
                **CASES[name][3],
            }
        )
    seen = {"kind": "activations", "hf": cases.QWEN3_MOE, "smoothing": 0.5, "kv_cache": "fp8"}
    for ranks, name, layout in (
        (1, "alone", {}),
        (2, "cp2", CP2),
        (4, "cp2_tp2_sp", SP),
    ):
        jobs[ranks].append({"name": f"seen {name}", "layout": layout, **seen})
    return cases.run(tmp_path_factory, *jobs.values())


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_same_step(case: str, found: Fields) -> None:
    here = found[case]
    one = found[f"{ALONE[case]} alone"]
    cases.close(here, one, 1e-4)
    cases.close(here, one, 1e-3, "after")
    assert (cases.tensor(one, "after") - cases.tensor(one)).abs().max() > 1e-2
    assert one["steps"][0]["optim/grad_norm"] > 0
    cases.same_steps(here, one, rtol=1e-3, atol=1e-5)
    assert here["steps"][0] == pytest.approx(one["steps"][0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("case", ["cp2", "cp2_tp2_sp"])
def test_what_passes_show_is_seen_on_some_rank(case: str, found: Fields) -> None:
    """For smoothing, and an FP8 cache."""
    here = found[f"seen {case}"]
    for name in ("amax", "cache", "cache_trained"):
        cases.close(here, found["seen alone"], 1e-5, name, rtol=1e-4)
        assert cases.tensor(here, name).min() > 0


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("multiple", [1, 2, 16])
def test_each_position_is_on_one_rank_and_causal_work_is_equal(ranks: int, multiple: int) -> None:
    batch = routed_batch()
    made = pack(batch, range(len(batch)), multiple, context=ranks)
    shares = [split(made, rank, ranks) for rank in range(ranks)]
    spans = made.starts.diff()
    assert not (spans % (2 * ranks)).any() and len(made.tokens_S) == len(made.positions_S) == int(
        spans.sum()
    )
    assert int(made.real_S.sum()) == made.tokens == int(batch.lengths_B.sum())
    for name in (field.name for field in fields(Pack) if field.name.endswith(("_S", "_SLK"))):
        if name not in ("packed_index_S", "held_S", "order_S"):
            joined = torch.cat([getattr(share, name) for share in shares])
            assert torch.equal(joined[shares[0].order_S], getattr(made, name)), name
    for share in shares:
        assert (
            len(share.tokens_S) == len(made.tokens_S) // ranks
            and len(share.tokens_S) % multiple == 0
        )
        assert torch.equal(made.tokens_S[share.held_S], share.tokens_S)
        assert torch.equal(made.labels_N[share.held_N], share.labels_N)
        assert torch.equal(share.held_S[share.logit_index_N], made.logit_index_N[share.held_N])
        # keys that its queries see
        assert int(share.positions_S.sum()) == int(shares[0].positions_S.sum())
    assert sorted(torch.cat([share.held_N for share in shares]).tolist()) == list(
        range(len(made.labels_N))
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_positions_are_those_that_megatron_core_turns(ranks: int) -> None:
    """On GPUs: Transformer Engine's order is the same (tests/gpu_set/test_set.py)."""
    made = pack(routed_batch(), range(4), context=ranks)
    for rank in range(ranks):
        parts = [
            _get_thd_freqs_on_this_cp_rank(
                rank, ranks, torch.empty(span // ranks), torch.arange(span)
            )
            for span in made.starts.diff().tolist()
        ]
        assert torch.equal(torch.cat(parts), split(made, rank, ranks).positions_S)
