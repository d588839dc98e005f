"""Router replay: the learner uses the sampler's experts, on every layout, in every pass."""

from itertools import count, cycle
from pathlib import Path
from typing import Any
from unittest import mock

import learner_cases as cases
import pytest
import torch
from learner_cases import Fields
from routing_worker import routed_batch

pytestmark = pytest.mark.ranks
SOME = cases.RECOMPUTE | {"recompute_method": "block", "recompute_num_layers": 2}
LAYOUTS = {
    **cases.EXPERT_LAYOUTS,
    "vp2_recompute": {"pipeline_parallel": 2, "megatron": cases.CHUNKS | cases.RECOMPUTE},
    "cp2_ep2": {**cases.CP2, "expert_parallel": 2},
    "cp2_recompute": {**cases.CP2, "megatron": SOME},
}
FOUR = {"cp2_tp2_sp": cases.CP2 | cases.LAYOUTS["tp2_sp"]}  # ranks
FAMILIES = {family: cases.FAMILIES[family] for family in ("qwen3_moe", "mixtral")}
WRONG = {"wrong_layer": "elsewhere", "recompute": "not computed again"}
LOST = ("cache_hit", "layers")
SILENT = 2  # the row without choices of experts


def _job(name: str, folder: Path, layout: Fields, **more: Any) -> Fields:
    return {
        "name": name,
        "kind": "routed",
        "hf": cases.QWEN3_MOE,
        "folder": str(folder),
        "layout": {"router": "replay", **layout},
        **more,
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return cases.folders_of(tmp_path_factory, FAMILIES)


@pytest.fixture(scope="module")
def found(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Fields:
    recompute = {**cases.PACKS, "megatron": cases.RECOMPUTE}
    unclipped = {"loss": "cross_entropy", "optim": {"clip_grad": 1e9}}
    one = [
        _job(
            family,
            folders[family],
            {},
            hf=hf,
            **unclipped,
        )
        for family, hf in FAMILIES.items()
    ]
    folder = folders["qwen3_moe"]
    one += [
        _job("one", folder, {}),
        _job("packs", folder, cases.PACKS),
        _job("recompute", folder, recompute),
        _job("silent", folder, {}, silent=SILENT),
    ]
    one += [
        _job(f"fault_{fault}", folder, recompute, kind="faulty", fault=fault)
        for fault in (*WRONG, *LOST)
    ]
    wide = cases.QWEN3_MOE | {"moe_intermediate_size": 64}
    bf16 = {"precision": "bf16"}
    one.append({"name": "mixture", "kind": "mixture", "hf": wide, "layout": bf16})
    two = [_job(name, folder, cases.PACKS | layout) for name, layout in LAYOUTS.items()]
    four = [_job(name, folder, layout) for name, layout in FOUR.items()]
    return cases.run(tmp_path_factory, one, two, four)


def transformers_routed(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs, and gradients of their mean in the routers, with a patched choice of experts."""
    model = cases.reference(folder)
    batch = routed_batch()
    topk = torch.topk
    rows = count()
    experts = batch.experts_PLK.split(batch.lengths_B.tolist())

    def routed(tokens_1S: torch.Tensor) -> Any:
        row = next(rows)
        layers = cycle(range(4))

        def chosen(values: torch.Tensor, k: int, dim: int) -> Any:
            given_SK = experts[row][:, next(layers)].long()
            taken_SK = torch.where(
                given_SK < 0,
                topk(values, k, dim=dim).indices,
                given_SK,
            )
            return values.gather(dim, taken_SK), taken_SK

        with mock.patch("torch.topk", chosen):
            return model(tokens_1S)

    found_N = cases.logprobs_by(routed, batch)
    (-(found_N * batch.mask_N).sum() / batch.mask_N.sum()).backward()
    gradients = [layer.mlp.gate.weight.grad for layer in model.model.layers]
    return found_N.detach(), torch.stack(gradients)


def test_a_layer_of_experts_rounds_as_vllm_s(found: Fields) -> None:
    assert found["mixture"] < 1e-4  # sums in another order, beside the middle of two values


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_the_routers_gradients_are_those_of_transformers(
    family: str, found: Fields, folders: dict[str, Path]
) -> None:
    wanted_N, gradients_LEH = transformers_routed(folders[family])
    cases.close(found[family], wanted_N, 3e-5)
    own_N = cases.tensor(found[family], "own")
    assert (own_N - wanted_N).abs().max() > 0.1, "the given experts are others"
    largest_L = gradients_LEH.abs().amax((1, 2), keepdim=True)
    assert (largest_L > 1e-5).all()
    found_LEH = cases.tensor(found[family], "gradients")
    cases.close(found_LEH / largest_L, gradients_LEH / largest_L, 1e-5)


@pytest.mark.parametrize("case", ["packs", "recompute", *LAYOUTS, *FOUR])
def test_every_layout_and_pass_replays(case: str, found: Fields) -> None:
    here = found[case]
    one = found["one"]
    cases.close(here, one, 3e-5)
    cases.close(cases.tensor(here, "reference"), one, 3e-5)
    cases.close(here, one, 3e-4, "after")
    cases.same_steps(here, one, rtol=1e-3, atol=1e-5)
    for part in ("scored", "trained"):
        replayed = [share for name, share in here[part].items() if "replayed" in name]
        assert replayed == [1.0] * 5  # of all layers, and of each
    assert here["scored"]["router/flips"] == pytest.approx(one["scored"]["router/flips"], abs=0.01)
    assert one["scored"]["router/flips"] > 0.5


def test_what_is_silent_is_chosen_by_the_learner_and_counted(found: Fields) -> None:
    silent = found["silent"]
    one = found["one"]
    assert one["unheard"]["router/replayed"] == 0
    read_B = routed_batch().lengths_B - 1
    share = 1 - float(read_B[SILENT] / read_B.sum())
    assert silent["scored"]["router/replayed"] == pytest.approx(share)
    wanted_N = cases.tensor(one)
    of_silent_N = routed_batch().responses.at_tokens(torch.arange(14) == SILENT)
    wanted_N[of_silent_N] = cases.tensor(silent, "own")[of_silent_N]
    cases.close(silent, wanted_N, 1e-6)


@pytest.mark.parametrize("fault", WRONG)
def test_a_run_is_refused_whose_choices_are_wrong(fault: str, found: Fields) -> None:
    assert WRONG[fault] in found[f"fault_{fault}"]["refused"]


@pytest.mark.parametrize("fault", LOST)
def test_a_run_says_which_choices_are_lost(fault: str, found: Fields) -> None:
    step = found[f"fault_{fault}"]
    assert 0 < step["router/replayed"] < 1
