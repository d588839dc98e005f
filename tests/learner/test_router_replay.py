"""Router replay: the learner uses the sampler's experts, on every layout, in every pass."""

from itertools import count, cycle
from pathlib import Path
from typing import Any
from unittest import mock

import learner_cases as cases
import pytest
import torch
from routing_worker import routed_batch

pytestmark = pytest.mark.ranks
PACKS = {"tokens_per_microbatch": 80}
SOME = cases.RECOMPUTE | {"recompute_method": "block", "recompute_num_layers": 2}
LAYOUTS = {
    **cases.EXPERT_LAYOUTS,
    "vp2_recompute": {"pipeline_parallel": 2, "megatron": cases.CHUNKS | cases.RECOMPUTE},
    "cp2_ep2": {**cases.CP2, "expert_parallel": 2},
    "cp2_recompute": {**cases.CP2, "megatron": SOME},
    "cp2_tp2_sp": cases.CP2 | cases.LAYOUTS["tp2_sp"],
}
BF16 = {"precision": "bf16", "router": "own"}
FOUR = ("cp2_tp2_sp",)  # ranks
WRONG = {"wrong_layer": "elsewhere", "recompute": "not computed again"}
LOST = ("cache_hit", "layers")
UNCLIPPED = {"clip_grad": 1e9}
SILENT = 2  # the row whose experts nobody tells


def _job(name: str, hf: dict[str, Any], layout: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "routed",
        "hf": hf,
        "layout": {"router": "replay", **layout},
        **more,
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return cases.folders_of(
        tmp_path_factory, {hf["model_type"]: hf for hf in (cases.QWEN3_MOE, cases.MIXTRAL)}
    )


@pytest.fixture(scope="module")
def found(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = {"folder": str(folders["qwen3_moe"])}
    recompute = {"megatron": cases.RECOMPUTE}
    one = [
        *(
            _job(
                family,
                cases.FAMILIES[family],
                {},
                folder=str(path),
                loss="cross_entropy",
                optim=UNCLIPPED,
            )
            for family, path in folders.items()
        ),
        _job("one", cases.QWEN3_MOE, {}, **folder),
        _job("packs", cases.QWEN3_MOE, PACKS, **folder),
        _job("recompute", cases.QWEN3_MOE, {**PACKS, **recompute}, **folder),
        _job("silent", cases.QWEN3_MOE, {}, silent=SILENT, **folder),
        _job("mixture", cases.QWEN3_MOE | {"moe_intermediate_size": 64}, BF16, kind="mixture"),
    ]
    one += [
        _job(
            f"fault_{fault}",
            cases.QWEN3_MOE,
            {**PACKS, **recompute},
            kind="faulty",
            fault=fault,
            **folder,
        )
        for fault in (*WRONG, *LOST)
    ]
    more = [
        _job(name, cases.QWEN3_MOE, PACKS | layout, **folder) for name, layout in LAYOUTS.items()
    ]
    four = [job for job in more if job["name"].endswith(FOUR)]
    results = cases.run(tmp_path_factory, one, [job for job in more if job not in four])
    return results | cases.run_ranks(4, four, tmp_path_factory.mktemp("four"))


def transformers_routed(folder: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logprobs, and gradients of their mean in the routers, with a patched choice of experts."""
    model = cases.reference(folder)
    batch = routed_batch()
    topk = torch.topk
    rows = count()
    experts_BSLK = cases.experts_of(batch)

    def routed(tokens_1S: torch.Tensor) -> Any:
        row = next(rows)
        layers = cycle(range(4))

        def chosen(values: torch.Tensor, k: int, dim: int) -> Any:
            given_SK = experts_BSLK[row, : len(values), next(layers)].long()
            taken_SK = torch.where(given_SK < 0, topk(values, k, dim=dim).indices, given_SK)
            return values.gather(dim, taken_SK), taken_SK

        with mock.patch("torch.topk", chosen):
            return model(tokens_1S)

    found_BT = cases.logprobs_by(routed, batch)
    (-(found_BT * batch.mask_BT).sum() / batch.mask_BT.sum()).backward()
    gradients = {
        name: value.grad
        for name, value in model.named_parameters()
        if name.endswith("mlp.gate.weight")
    }
    return found_BT.detach(), gradients


def test_a_layer_of_experts_rounds_as_vllm_s(found: dict[str, Any]) -> None:
    assert found["mixture"] < 1e-4  # sums in another order, beside the middle of two values


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_logprobs_and_the_routers_gradients_are_those_of_transformers(
    family: str, found: dict[str, Any], folders: dict[str, Path]
) -> None:
    wanted_BT, gradients = transformers_routed(folders[family])
    torch.testing.assert_close(cases.matrix(found[family]), wanted_BT, rtol=0, atol=3e-5)
    assert (cases.matrix(found[family], "own") - wanted_BT).abs().max() > 0.1, (
        "the given experts are others"
    )
    ours = found[family]["gradients"]
    assert len(ours) == len(gradients) == 4
    for (name, value), wanted in zip(
        sorted(ours.items()), (gradients[name] for name in sorted(gradients)), strict=True
    ):
        assert wanted.abs().max() > 1e-5
        found_gradient = torch.tensor(value)
        largest = float(wanted.abs().max())
        torch.testing.assert_close(found_gradient, wanted, rtol=0, atol=1e-5 * largest, msg=name)


@pytest.mark.parametrize("case", ["packs", "recompute", *LAYOUTS])
def test_every_layout_and_pass_replays(case: str, found: dict[str, Any]) -> None:
    here = found[case]
    one = found["one"]
    for part in ("logprobs", "reference"):
        torch.testing.assert_close(cases.matrix(here, part), cases.matrix(one), rtol=0, atol=3e-5)
    torch.testing.assert_close(
        cases.matrix(here, "after"), cases.matrix(one, "after"), rtol=0, atol=3e-4
    )
    for ours, theirs in zip(here["steps"], one["steps"], strict=True):
        assert ours["optim/grad_norm"] == pytest.approx(theirs["optim/grad_norm"], rel=1e-3)
    for part in ("scored", "trained"):
        assert {name: share for name, share in here[part].items() if "replayed" in name} == {
            "router/replayed": 1.0,
            **{f"router/replayed/layer_{layer}": 1.0 for layer in range(4)},
        }
    assert here["scored"]["router/flips"] == pytest.approx(one["scored"]["router/flips"], abs=0.01)
    assert one["scored"]["router/flips"] > 0.5


def test_what_nobody_tells_is_chosen_by_the_learner_and_counted(found: dict[str, Any]) -> None:
    silent = found["silent"]
    one = found["one"]
    assert one["unheard"]["router/replayed"] == 0
    batch = routed_batch()
    read_B = batch.prompt_lengths_B + batch.response_lengths_B - 1
    share = 1 - float(read_B[SILENT] / read_B.sum())
    assert silent["scored"]["router/replayed"] == pytest.approx(share)
    rows = [row for row in range(len(batch)) if row != SILENT]
    logprobs = cases.matrix(silent)
    own = cases.matrix(silent, "own")
    torch.testing.assert_close(logprobs[SILENT], own[SILENT], rtol=0, atol=1e-6)
    torch.testing.assert_close(logprobs[rows], cases.matrix(one)[rows], rtol=0, atol=1e-6)


@pytest.mark.parametrize("fault", WRONG)
def test_a_run_is_refused_whose_choices_are_wrong(fault: str, found: dict[str, Any]) -> None:
    assert WRONG[fault] in found[f"fault_{fault}"]["refused"]


@pytest.mark.parametrize("fault", LOST)
def test_a_run_says_which_choices_are_lost(fault: str, found: dict[str, Any]) -> None:
    step = found[f"fault_{fault}"]
    assert 0 < step["router/replayed"] < 1
