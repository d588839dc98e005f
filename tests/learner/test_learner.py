"""The learner against transformers, and against itself on every layout.

The learner runs in two spawns of processes, one rank and two ranks, which do all the cases in turn.
"""

import functools
import math
import re
from pathlib import Path
from typing import Any

import learner_cases as cases
import pytest
import torch
from learner_cases import Fields
from safetensors.torch import save_file

from megatron_rl.config.schema import KlOn
from megatron_rl.models.layout import Place

pytestmark = pytest.mark.ranks
ORDERED = ("tp2", "pp2", "dp2")
STEPS = 3
LAYOUTS = {"one": {}, **cases.ALL_LAYOUTS}
# layouts whose activations are compared
SEEN = {
    "qwen3": ["one", *cases.LAYOUTS],
    "qwen3_moe": ["one", "tp2_sp", "tp2_ep2", "ep2"],
}
MEASURED_ONCE = {
    f"{at}_recompute": {
        **cases.PACKS,
        **LAYOUTS[at],
        "megatron": cases.RECOMPUTE | LAYOUTS[at].get("megatron", {}),
    }
    for at in ("one", "tp2_sp", "pp2")
}
UPDATED = {at: LAYOUTS[at] for at in ("one", *cases.LAYOUTS)} | MEASURED_ONCE
ONE_KV_HEAD = {**cases.QWEN3, "num_key_value_heads": 1}
RECOMPUTED = {
    "recompute": {"recompute": "full"},
    "recompute_some": {"megatron": {**cases.RECOMPUTE, "recompute_method": "block"}},
    "recompute_parts": {"recompute": "selective"},
}
# (learner section, words that the error must hold)
REFUSED = {
    "field": ({"megatron": {"num_layer": 2}}, "learner.megatron.num_layer"),
    "world": ({"tensor_parallel": 2}, "needs 2 processes"),
}


def _train(name: str, hf: Fields, layout: Fields | None = None, **rest: Any) -> Fields:
    return {"name": name, "hf": hf, "layout": layout or {}, "steps": STEPS, **rest}


def _activations(folders: dict[str, Path], family: str, at: str) -> Fields:
    """Two packs per replica, and lengths that leave filler behind under sequence parallelism."""
    return {
        "name": f"activations_{family}_{at}",
        "kind": "activations",
        "hf": cases.FAMILIES[family],
        "folder": str(folders[family]),
        "layout": cases.PACKS | LAYOUTS[at],
        "smoothing": 0.5,
        "kv_cache": "fp8",
    }


def _one_update(at: str) -> list[Fields]:
    """With a pass before it and without."""
    job = {
        "kind": "one_update",
        "hf": cases.QWEN3,
        "precision": "bf16",
        "smoothing": 0.5,
        "kv_cache": "fp8" if at in MEASURED_ONCE else "none",
        "layout": UPDATED[at],
    }
    return [{**job, "name": f"once_{at}_{scored}", "scored": scored} for scored in (True, False)]


def _flips(folder: Path, at: str) -> Fields:
    return {
        "name": f"flips_{at}",
        "kind": "flips",
        "hf": cases.QWEN3_MOE,
        "folder": str(folder),
        "layout": cases.PACKS | LAYOUTS[at],
        "chosen": str(folder / "chosen.safetensors"),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = cases.folders_of(tmp_path_factory, cases.FAMILIES, moved=True)
    experts = made["qwen3_moe"]
    save_file({"chosen": transformers_experts(experts)}, experts / "chosen.safetensors")
    return made


def _of_one(folders: dict[str, Path]) -> list[Fields]:
    bad = {"hf": cases.QWEN3, "kind": "nonfinite"}
    return [
        *(
            {"name": family, "hf": cases.FAMILIES[family], "folder": str(path)}
            for family, path in folders.items()
        ),
        _train("fp32", cases.QWEN3),
        _train("kept", cases.QWEN3, kept=True, entropy_coef=0.1),
        {
            "name": "kept_qwen2",
            "hf": cases.QWEN2,
            "folder": str(folders["qwen2"]),
            "kept": True,
        },
        _train("bf16", cases.QWEN3, precision="bf16", loss="cross_entropy"),
        _train("untied", cases.LLAMA),
        _train("moe", cases.QWEN3_MOE),
        _train("one_kv_head", ONE_KV_HEAD),
        _train("entropy", cases.QWEN3, entropy_coef=0.1),
        _train("packs_of_80", cases.QWEN3, cases.PACKS),
        _train("unpacked", cases.QWEN3, {"tokens_per_microbatch": 1}),
        *(_train(name, cases.QWEN3, layout) for name, layout in RECOMPUTED.items()),
        *(_activations(folders, family, "one") for family in SEEN),
        *_one_update("one"),
        *_one_update("one_recompute"),
        _flips(folders["qwen3_moe"], "one"),
        *(
            {"name": on, "kind": "rejected", "hf": cases.QWEN3, "kl_coef": 0.1, "kl_on": on}
            for on in KlOn
        ),
        {**bad, "name": "raise"},
        {**bad, "name": "skip", "on_nonfinite": "skip"},
        *(
            {"name": f"no_{name}", "kind": "refused", "hf": cases.QWEN3, "layout": layout}
            for name, (layout, _) in REFUSED.items()
        ),
    ]


def _of_two(folders: dict[str, Path]) -> list[Fields]:
    jobs = [job for at in UPDATED if not at.startswith("one") for job in _one_update(at)]
    for at, layout in cases.LAYOUTS.items():
        jobs += [
            _train(f"fp32_{at}", cases.QWEN3, layout),
            _train(f"bf16_{at}", cases.QWEN3, layout, precision="bf16", loss="cross_entropy"),
            _train(f"untied_{at}", cases.LLAMA, layout),
            _train(f"kept_{at}", cases.QWEN3, layout, kept=True, entropy_coef=0.1),
            _train(f"qwen2_{at}", cases.QWEN2, layout, folder=str(folders["qwen2"])),
        ]
    for at, layout in cases.EXPERT_LAYOUTS.items():
        jobs += [_train(f"moe_{at}", cases.QWEN3_MOE, layout), _flips(folders["qwen3_moe"], at)]
    for at in ORDERED:
        reverse = _train(f"order_{at}", cases.QWEN3, LAYOUTS[at], kind="refused", reversed=True)
        jobs.append(reverse)
    for family, (_, *layouts) in SEEN.items():
        jobs += [_activations(folders, family, at) for at in layouts]
    tp2 = LAYOUTS["tp2"]
    jobs.append(_train("one_kv_head_tp2", ONE_KV_HEAD, tp2))
    jobs.append(_train("own_recompute", cases.QWEN3, tp2, recompute=["full", "none"]))
    for at in ("dp2", "vp2"):
        jobs.append(_train(f"{at}_packs_of_80", cases.QWEN3, LAYOUTS[at] | cases.PACKS))
    for kind in ("broadcast", "dead_rank"):  # the latter at the end
        jobs.append(_train(kind, cases.QWEN3, LAYOUTS["dp2"], kind=kind))
    return jobs


@pytest.fixture(scope="module")
def found(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Fields:
    return cases.run(tmp_path_factory, _of_one(folders), _of_two(folders))


@pytest.mark.parametrize("case", [*cases.FAMILIES, *(f"qwen2_{at}" for at in cases.LAYOUTS)])
def test_logprobs_are_those_of_transformers(
    case: str, found: Fields, folders: dict[str, Path]
) -> None:
    family = case if case in folders else "qwen2"
    cases.close(found[case], cases.transformers_logprobs(folders[family]), 3e-5)


def test_logprobs_among_kept_tokens_are_those_of_transformers(
    found: Fields, folders: dict[str, Path]
) -> None:
    batch = cases.with_kept(cases.make_batch())
    wanted_N = cases.transformers_logprobs(folders["qwen2"], batch)
    cases.close(found["kept_qwen2"], wanted_N, 3e-5)
    assert (wanted_N - cases.tensor(found["qwen2"])).abs().max() > 1


def test_what_the_policy_would_not_have_kept_is_counted(found: Fields) -> None:
    step = found["kept"]["steps"][0]
    assert 0.5 < step["rollout_corr/outside_support"] < 1  # answers at random
    assert step["rollout_corr/kept_log_mass"] < -1


# (case, what it is like on one rank in one pack, to what)
ALIKE = [
    (f"{model}_{at}", model, 1e-4) for model in ("fp32", "untied", "kept") for at in cases.LAYOUTS
]
ALIKE += [(f"bf16_{at}", "bf16", 2e-2) for at in cases.LAYOUTS]
ALIKE += [(f"moe_{at}", "moe", 1e-4) for at in cases.EXPERT_LAYOUTS]
ALIKE += [("one_kv_head_tp2", "one_kv_head", 1e-4)]  # tensor-parallel ranks share it
ALIKE += [(f"{at}_packs_of_80", "fp32", 1e-4) for at in ("dp2", "vp2")]
ALIKE += [(case, "fp32", 1e-4) for case in ("packs_of_80", "unpacked", *RECOMPUTED)]
# where ranks have decided each for its own machine, the driver's holds
ALIKE += [("own_recompute", "fp32", 1e-4)]


@pytest.mark.parametrize(("case", "wanted", "rel"), ALIKE)
def test_layouts_and_packs_train_alike(case: str, wanted: str, rel: float, found: Fields) -> None:
    here = found[case]
    there = found[wanted]
    assert len(here["steps"]) == STEPS
    cases.close(here, there, 10 * rel)
    cases.same_steps(here, there, rtol=rel, atol=rel / 10)
    cases.close(here, there, 20 * rel, "after")


def test_training_moves_the_policy(found: Fields) -> None:
    """Guards the comparisons above: they would also hold for a learner that does nothing."""
    for case in ("fp32", "bf16", "untied", "moe"):
        moved = (cases.tensor(found[case], "after") - cases.tensor(found[case])).abs().max()
        assert moved > 0.05, case
        assert found[case]["steps"][0]["optim/grad_norm"] > 0.05, case
    losses = [step["loss/total"] for step in found["bf16"]["steps"]]
    assert losses[-1] < losses[0]


@functools.cache
def transformers_activations(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest magnitude of each norm's output and of attention's cached values, over real tokens.

    [layer, norm, channel] and [layer, (key, value)].
    """
    reference = cases.reference(folder)
    layers = reference.config.num_hidden_layers
    amax_LNH = torch.zeros(layers, 2, reference.config.hidden_size)
    cache_L2 = torch.zeros(layers, 2)

    def watch(place_H: torch.Tensor, norm: torch.nn.Module) -> None:
        def see(_: torch.nn.Module, __: Any, out: torch.Tensor) -> None:
            place_H.copy_(torch.maximum(place_H, out.flatten(0, 1).abs().amax(0)))

        norm.register_forward_hook(see)

    for layer, block in enumerate(reference.model.layers):
        watch(amax_LNH[layer, 0], block.input_layernorm)
        watch(amax_LNH[layer, 1], block.post_attention_layernorm)
    batch = cases.make_batch()
    with torch.no_grad():
        for tokens_S in cases.tokens_of(batch):
            cached = reference(tokens_S[None], use_cache=True).past_key_values
            for layer, of_layer in enumerate(cached.layers):
                seen_2 = torch.stack([of_layer.keys.abs().amax(), of_layer.values.abs().amax()])
                cache_L2[layer] = torch.maximum(cache_L2[layer], seen_2)
    return amax_LNH, cache_L2


@pytest.mark.parametrize(
    ("family", "at"), [(family, at) for family, layouts in SEEN.items() for at in layouts]
)
def test_every_layout_sees_the_same_activations(
    family: str, at: str, found: Fields, folders: dict[str, Path]
) -> None:
    case = found[f"activations_{family}_{at}"]
    wanted_LNH, cache_L2 = transformers_activations(folders[family])
    assert (wanted_LNH > 0).all()
    cases.close(case, wanted_LNH, 1e-5, "amax", rtol=1e-4)
    cases.close(case, cache_L2, 1e-5, "cache", rtol=1e-4)
    assert not case["unseen"]
    assert not case["left"]
    assert not case["cache_unseen"]
    assert cases.tensor(case, "cache_trained").min() > 0


@pytest.mark.parametrize("at", UPDATED)
def test_an_update_s_own_forward_pass_stands_for_the_one_before_it(at: str, found: Fields) -> None:
    """Maxima are taken of each norm and each cache once in a micro-batch, whether activations are
    recomputed or not.
    """
    scored = found[f"once_{at}_True"]
    own = found[f"once_{at}_False"]
    caches = {"CacheStats": 1} if at in MEASURED_ONCE else {}
    assert scored.pop("looks") == caches
    assert own.pop("looks") == {"ActivationStats": 2, **caches}
    assert own == scored
    assert own["metrics"]["loss/ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert own["metrics"]["optim/grad_norm"] > 0


def transformers_experts(folder: Path) -> torch.Tensor:
    """[token, layer, expert]: experts of each token of all rows."""
    model = cases.reference(folder)
    rows = []
    for tokens_S in cases.tokens_of(cases.make_batch()):
        with torch.no_grad():
            routers = model(tokens_S[None], output_router_logits=True).router_logits
        chosen = [logits.view(len(tokens_S), -1).topk(2).indices for logits in routers]
        rows.append(torch.stack(chosen, dim=1))
    return torch.cat(rows)


@pytest.mark.parametrize("layout", ["one", *cases.EXPERT_LAYOUTS])
def test_router_flips_are_counted_layer_by_layer(layout: str, found: Fields) -> None:
    same, exchanged, silent = found[f"flips_{layout}"]
    tokens = int(cases.make_batch().lengths_B.sum())
    assert same == {"sync/router_flips": 0} | {
        f"sync/router_flips/layer_{layer}": 0 for layer in range(4)
    }
    assert exchanged["sync/router_flips"] == pytest.approx(2 / (4 * tokens))
    by_layer = [exchanged[f"sync/router_flips/layer_{layer}"] * tokens for layer in range(4)]
    assert by_layer == pytest.approx([1, 0, 0, 1], abs=1e-3)
    assert silent == {}


def test_entropy_bonus_raises_entropy(found: Fields) -> None:
    assert (
        found["entropy"]["steps"][-1]["loss/entropy"] > found["fp32"]["steps"][-1]["loss/entropy"]
    )


def test_the_kl_of_rejected_rows_is_computed_where_it_counts(found: Fields) -> None:
    assert "loss/kl" not in found["trained"]
    assert found["trained"]["optim/grad_norm"] == 0.0
    assert found["counted"]["loss/kl"] == pytest.approx(math.exp(-0.5) - 0.5, rel=1e-4)
    assert found["counted"]["loss/policy"] == 0.0
    assert found["counted"]["optim/grad_norm"] > 0.0


def test_what_cannot_work_is_refused_by_name(found: Fields) -> None:
    for case, (_, words) in REFUSED.items():
        assert words in found[f"no_{case}"], case


@pytest.mark.parametrize("name", ORDERED)
def test_another_order_of_ranks_than_megatron_s_is_refused(name: str, found: Fields) -> None:
    """Such a rank would load one shard and send another."""
    ours, megatrons = re.findall(r"Place\([^)]*\)", found[f"order_{name}"])
    assert ours != megatrons == str(Place())


@pytest.mark.parametrize("case", ["raise", "skip"])
def test_a_non_finite_loss_leaves_the_policy_alone(case: str, found: Fields) -> None:
    result = found[case]
    assert result["unchanged"]
    assert result["next"]["optim/skipped"] == 0.0
    assert result["next"]["optim/grad_norm"] > 0
    if case == "raise":
        assert "learner.on_nonfinite" in result["error"]
    else:
        assert result["metrics"]["optim/skipped"] == 1.0
        assert result["error"] == ""


def test_the_driver_reaches_every_rank(found: Fields) -> None:
    assert found["broadcast"] == {"same": 2.0, "rank_0": 1.0, "rank_1": 1.0}


def test_a_dead_rank_does_not_hang_the_others(found: Fields) -> None:
    assert found["dead_rank"]
