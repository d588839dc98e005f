"""Adapters on every layout against PEFT on the same weights, and what a sync sends of them."""

from functools import partial
from pathlib import Path
from typing import Any

import learner_cases as cases
import pytest
import torch
from learner_cases import Fields
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.config.schema import CorrectionConfig, LossConfig
from megatron_rl.learner.weights import with_new_adapters
from megatron_rl.loss.policy_loss import count_totals, policy_loss
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import adapters, params
from megatron_rl.models.model import Model
from megatron_rl.models.shape import Lora

RANK = 4
ALPHA = 6.0
TARGETS = {family: ["all-linear"] for family in ("qwen3", "qwen3_moe", "phi3")}
TARGETS["qwen2"] = ["q_proj", "v_proj", "up_proj"]
MODELS = {
    hf["model_type"]: hf
    for hf in (
        cases.QWEN3,
        cases.QWEN3_MOE,
        cases.PHI3,
        cases.QWEN2,
    )
}


def _model(family: str) -> Model:
    return Model.of(
        MODELS[family],
        Layout(),
        lora=Lora(RANK, ALPHA, tuple(TARGETS[family])),
    )


def _given(family: str) -> dict[str, Tensor]:
    """Adapters that have been trained: B is not zero, but for layers that are no targets."""
    model = _model(family)
    random = torch.Generator().manual_seed(3)
    made = {}
    begin = with_new_adapters(lambda name: torch.zeros(0), model, 1)
    for param in params(model.shape):
        for one in adapters(param, model.shape):
            for name in one.hf:
                made[name] = begin(name)
                if "lora_B" in name and model.shape.lora.adapts(name.replace(".lora_B", "")):
                    made[name] = torch.randn(made[name].shape, generator=random) * 0.1
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = cases.folders_of(tmp_path_factory, MODELS)
    for family, folder in made.items():
        save_file(_given(family), folder.with_suffix(".adapters"))
    return made


AT = {
    **{("qwen3", name): layout for name, layout in cases.LAYOUTS.items()},
    **{("qwen3_moe", name): layout for name, layout in cases.EXPERT_LAYOUTS.items()},
    ("phi3", "tp2"): cases.LAYOUTS["tp2"],
    ("qwen2", "tp2"): cases.LAYOUTS["tp2"],
}


def _job(family: str, at: str, layout: Fields, folders: dict[str, Path], **more: Any) -> Fields:
    lora = {"rank": RANK, "alpha": ALPHA, "targets": TARGETS[family]}
    where = folders[family]
    return {
        "name": f"{family}_{at}",
        "kind": "adapted",
        "hf": MODELS[family],
        "folder": str(where),
        "layout": layout | {"lora": lora},
        "adapters": str(where.with_suffix(".adapters")),
        "out": str(where.parent / f"out_{family}_{at}"),
        "optim": {"clip_grad": 0.0},
        **more,
    }


def _twins(at: str, layout: Fields, folders: dict[str, Path]) -> list[Fields]:
    """A BF16 learner with adapters, and one without that loads what the first has merged."""
    first = _job("qwen3", f"bf16_{at}", layout, folders, precision="bf16")
    rest = {"layout": layout, "precision": "bf16", "folder": f"{first['out']}/merged"}
    return [first, {"name": f"twin_{at}", "kind": "expects", "hf": cases.QWEN3, **rest}]


@pytest.fixture(scope="module")
def found(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Fields:
    one = [_job(family, "one", {}, folders) for family in MODELS]
    one.append(_job("qwen3", "recompute", {"megatron": cases.RECOMPUTE}, folders))
    two = [_job(family, at, layout, folders) for (family, at), layout in AT.items()]
    one += _twins("one", {}, folders)
    two += _twins("tp2", cases.LAYOUTS["tp2"], folders)
    return cases.run(tmp_path_factory, one, two)


def _loss(logprobs_N: Tensor) -> Tensor:
    """The jobs' loss, by the formula that the learner has (tests/loss)."""
    batch = cases.make_batch()
    targets = cases.make_targets(batch, logprobs_N.detach())
    counts_B = batch.responses.count(batch.mask_N)
    totals = count_totals(counts_B, batch.groups_B, 512)
    return policy_loss(logprobs_N, targets, LossConfig(), totals, CorrectionConfig())[0]


@pytest.fixture(scope="module")
def wanted(
    folders: dict[str, Path],
) -> dict[str, tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]:
    """Logprobs, gradients and merged weights per family: by PEFT, for experts by the formula."""
    return {
        family: _by_formula(folders[family])
        if "moe" in family
        else _by_peft(family, folders[family])
        for family in MODELS
    }


def _by_peft(family: str, folder: Path) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    from peft import LoraConfig, get_peft_model

    targets = "all-linear" if TARGETS[family] == ["all-linear"] else TARGETS[family]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(cases.reference(folder), config)
    given = load_file(folder.with_suffix(".adapters"))
    held = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            short = name.removeprefix("base_model.model.").replace(".default", "")
            held[short] = parameter
            parameter.data.copy_(given[short])
    logprobs_N = cases.logprobs_by(model)
    _loss(logprobs_N).backward()
    gradients = {name: parameter.grad for name, parameter in held.items()}
    with torch.no_grad():
        merged = dict(model.merge_and_unload().named_parameters())
    return logprobs_N.detach(), gradients, merged


def _by_formula(folder: Path) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """weight + alpha / rank * B A in transformers' model, which joins experts to tensors that PEFT
    has no layer for.
    """
    model = cases.reference(folder)
    given = {
        name: one.requires_grad_()
        for name, one in load_file(folder.with_suffix(".adapters")).items()
    }

    def added(layer: str) -> Tensor:
        a, b = (given[f"{layer}.lora_{letter}.weight"] for letter in "AB")
        return ALPHA / RANK * b @ a

    merged = {}
    stored = {}
    for name, weight in model.named_parameters():
        weight = weight.detach()
        experts, _, kind = name.partition(".mlp.experts.")
        if kind:
            names = [f"{experts}.mlp.experts.{expert}" for expert in range(len(weight))]
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
            merged[name] = weight + torch.stack(
                [torch.cat([added(f"{one}.{part}") for part in parts]) for one in names]
            )
            for one, whole in zip(names, merged[name], strict=True):
                for part, some in zip(parts, whole.chunk(len(parts)), strict=True):
                    stored[f"{one}.{part}.weight"] = some
        else:
            layer = name.removesuffix(".weight")
            if f"{layer}.lora_A.weight" in given:
                weight = weight + added(layer)
            merged[name] = stored[name] = weight
    logprobs_N = cases.logprobs_by(partial(torch.func.functional_call, model, merged))
    _loss(logprobs_N).backward()
    return logprobs_N.detach(), {name: one.grad for name, one in given.items()}, stored


CASES = [
    *((family, "one") for family in MODELS),
    ("qwen3", "recompute"),
    *AT,
]


@pytest.mark.parametrize(("family", "at"), CASES)
def test_logprobs_and_gradients_are_those_of_peft(
    family: str, at: str, found: Fields, wanted: Fields, folders: dict[str, Path]
) -> None:
    logprobs_N, gradients, _ = wanted[family]
    mask_N = cases.make_batch().mask_N
    here_N = cases.tensor(found[f"{family}_{at}"])
    cases.close(here_N * mask_N, logprobs_N * mask_N, 1e-5, rtol=1e-6)
    its = load_file(folders[family].parent / f"out_{family}_{at}" / "gradients.safetensors")
    idle = [name for name in its if name not in gradients]
    # the rows of layers that are no targets
    assert all("lora_B" in name and not its[name].any() for name in idle)
    assert (family == "qwen2") == bool(idle)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert largest > 0.01
    for name, gradient in gradients.items():
        cases.close(its[name], gradient, 1e-5 * max(1, largest))


@pytest.mark.parametrize(("family", "at"), [case for case in CASES if case[1] != "one"])
def test_a_sync_sends_the_same_bytes_from_every_layout(family: str, at: str, found: Fields) -> None:
    sent = found[f"{family}_{at}"]["sent"]
    alone = found[f"{family}_one"]["sent"]
    assert sent == alone and sent["int8"] != sent["none"]


@pytest.mark.parametrize("family", MODELS)
def test_merged_weights_are_those_of_peft_to_one_rounding(
    family: str, found: Fields, wanted: Fields, folders: dict[str, Path]
) -> None:
    _, _, merged = wanted[family]
    its = load_file(folders[family].parent / f"out_{family}_one" / "merged" / "model.safetensors")
    assert its.keys() <= merged.keys() and len(its) > 20
    for name, weight in its.items():
        rounding = merged[name].abs() * 2**-8 + 1e-7
        assert bool(((weight.float() - merged[name]).abs() <= rounding).all()), name


@pytest.mark.parametrize(("family", "at"), CASES)
def test_without_its_adapters_it_is_the_reference(
    family: str, at: str, found: Fields, folders: dict[str, Path]
) -> None:
    case = found[f"{family}_{at}"]
    mask_N = cases.make_batch().mask_N
    base_N = cases.tensor(case, "base")
    wanted_N = cases.transformers_logprobs(folders[family])
    cases.close(base_N * mask_N, wanted_N * mask_N, 1e-5, rtol=1e-6)
    assert (base_N - cases.tensor(case)).abs().max() > 0.1


@pytest.mark.parametrize(("family", "at"), CASES)
def test_a_checkpoint_holds_adapters_alone(
    family: str, at: str, found: Fields, folders: dict[str, Path]
) -> None:
    from megatron_rl.checkpoint.torch_dist.index import read_index

    case = found[f"{family}_{at}"]
    assert case["again"] == case["after"] != case["logprobs"]
    kept = read_index(folders[family].parent / f"out_{family}_{at}")
    assert all(".lora." in key for key in kept)


@pytest.mark.parametrize("at", ["one", "tp2"])
def test_the_probe_expects_what_a_sampler_of_the_merged_weights_says(
    at: str, found: Fields
) -> None:
    case = found[f"qwen3_bf16_{at}"]
    twin = found[f"twin_{at}"]
    assert case["expected"] == twin["expected"] != case["logprobs"]
