"""The learner against transformers, and against itself on every layout.

The learner runs in two spawns of processes, one rank and two ranks, which do all the cases in turn.
"""

import math
import re
from pathlib import Path
from typing import Any

import learner_cases as cases
import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.config.schema import KlOn
from megatron_rl.models.layout import Place

pytestmark = pytest.mark.ranks
ORDERED = ("tp2", "pp2", "dp2")
STEPS = 3
# layouts whose activations are compared
SEEN = {
    "dense": list(cases.LAYOUTS),
    "experts": ["tp2_sp", "tp2_ep2", "ep2"],
}
MEASURED_ONCE = ("one_recompute", "tp2_sp_recompute", "pp2_recompute")
ONE_KV_HEAD = {**cases.QWEN3, "num_key_value_heads": 1}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "full"},
    "recompute_some": {"megatron": {**cases.RECOMPUTE, "recompute_method": "block"}},
    "recompute_parts": {"recompute": "selective"},
}
# (config.json, learner section, words that the error must hold)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "field": (cases.QWEN3, {"megatron": {"num_layer": 2}}, "learner.megatron.num_layer"),
    "world": (cases.QWEN3, {"tensor_parallel": 2}, "needs 2 processes"),
    "rope": ({**cases.QWEN3, "rope_scaling": {"rope_type": "yarn"}}, {}, "rope_type 'yarn'"),
    "activation": ({**cases.QWEN3, "hidden_act": "gelu"}, {}, "hidden_act='gelu'"),
    "family": ({**cases.QWEN3, "model_type": "qwen4"}, {}, "'qwen4'"),
}


def _train(
    name: str, hf: dict[str, Any], layout: dict[str, Any] | None = None, **rest: Any
) -> dict[str, Any]:
    return {"name": name, "hf": hf, "layout": layout or {}, "steps": STEPS, **rest}


def _activations(model: str, at: str = "one") -> dict[str, Any]:
    # two packs per replica, and lengths that leave filler behind under sequence parallelism
    layout = {"tokens_per_microbatch": 80, **cases.ALL_LAYOUTS.get(at, {})}
    job = {
        "name": f"activations_{model}_{at}",
        "kind": "activations",
        "hf": cases.MODELS[model],
        "layout": layout,
    }
    return {**job, "smoothing": 0.5, "kv_cache": "fp8"}


def _one_update(at: str = "one") -> list[dict[str, Any]]:
    """With a pass before it and without."""
    name = at.removesuffix("_recompute")
    job: dict[str, Any] = {
        "kind": "one_update",
        "hf": cases.QWEN3,
        "precision": "bf16",
        "smoothing": 0.5,
    }
    job |= {"layout": cases.LAYOUTS.get(name, {})}
    if at in MEASURED_ONCE:
        layout = {"tokens_per_microbatch": 80, **job["layout"]}
        job |= {
            "layout": {**layout, "megatron": layout.get("megatron", {}) | cases.RECOMPUTE},
            "kv_cache": "fp8",
        }
    return [{**job, "name": f"once_{at}_{scored}", "scored": scored} for scored in (True, False)]


def _flips(folder: Path, at: str = "one") -> dict[str, Any]:
    path = folder / "chosen.safetensors"
    if not path.exists():
        save_file({"chosen": transformers_experts(folder)}, path)
    layout = {"tokens_per_microbatch": 80, **cases.ALL_LAYOUTS.get(at, {})}
    job = {"name": f"flips_{at}", "kind": "flips", "hf": cases.QWEN3_MOE, "folder": str(folder)}
    return {**job, "layout": layout, "chosen": str(path)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return cases.folders_of(tmp_path_factory, cases.FAMILIES, moved=True)


@pytest.fixture(scope="module")
def one(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("one_rank")
    bad = {"hf": cases.QWEN3, "kind": "nonfinite"}
    jobs = [
        *(
            {"name": family, "hf": cases.FAMILIES[family], "folder": str(path)}
            for family, path in folders.items()
        ),
        _train("fp32", cases.QWEN3),
        _train("kept", cases.QWEN3, kept=True, entropy_coef=0.1),
        {"name": "kept_qwen2", "hf": cases.QWEN2, "folder": str(folders["qwen2"]), "kept": True},
        _train("bf16", cases.QWEN3, precision="bf16", loss="cross_entropy"),
        _train("untied", cases.LLAMA),
        _train("moe", cases.QWEN3_MOE),
        _train("one_kv_head", ONE_KV_HEAD),
        _train("entropy", cases.QWEN3, entropy_coef=0.1),
        _train("packs_of_80", cases.QWEN3, {"tokens_per_microbatch": 80}),
        _train("unpacked", cases.QWEN3, {"tokens_per_microbatch": 1}),
        *(_train(name, cases.QWEN3, layout) for name, layout in RECOMPUTED.items()),
        *(_activations(model) for model in SEEN),
        *_one_update(),
        *_one_update("one_recompute"),
        _flips(folders["qwen3_moe"]),
        *(
            {"name": on, "kind": "rejected", "hf": cases.QWEN3, "kl_coef": 0.1, "kl_on": on}
            for on in KlOn
        ),
        {**bad, "name": "raise"},
        {**bad, "name": "skip", "on_nonfinite": "skip"},
        *(
            {"name": f"no_{n}", "kind": "refused", "hf": hf, "layout": at}
            for n, (hf, at, _) in REFUSED.items()
        ),
    ]
    return {**cases.run_ranks(1, jobs, work), "work": work}


@pytest.fixture(scope="module")
def two(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = []
    for name, layout in cases.LAYOUTS.items():
        jobs.append(_train(f"fp32_{name}", cases.QWEN3, layout))
        jobs.append(
            _train(f"bf16_{name}", cases.QWEN3, layout, precision="bf16", loss="cross_entropy")
        )
        jobs.append(_train(f"untied_{name}", cases.LLAMA, layout))
        jobs.append(_train(f"kept_{name}", cases.QWEN3, layout, kept=True, entropy_coef=0.1))
        jobs.append(
            {
                "name": f"qwen2_{name}",
                "hf": cases.QWEN2,
                "layout": layout,
                "folder": str(folders["qwen2"]),
            }
        )
        jobs += _one_update(name)
    for name, layout in cases.EXPERT_LAYOUTS.items():
        jobs += [_train(f"moe_{name}", cases.QWEN3_MOE, layout), _flips(folders["qwen3_moe"], name)]
    jobs += [job for name in MEASURED_ONCE[1:] for job in _one_update(name)]
    for name in ORDERED:
        jobs.append(
            {
                **_train(f"order_{name}", cases.QWEN3, cases.LAYOUTS[name]),
                "kind": "refused",
                "reversed": True,
            }
        )
    jobs += [_activations(model, at) for model, layouts in SEEN.items() for at in layouts]
    jobs.append(_train("one_kv_head", ONE_KV_HEAD, cases.LAYOUTS["tp2"]))
    jobs.append(
        _train("own_recompute", cases.QWEN3, cases.LAYOUTS["tp2"], recompute=["full", "none"])
    )
    for name in ("dp2", "vp2"):
        packs = {**cases.LAYOUTS[name], "tokens_per_microbatch": 80}
        jobs.append(_train(f"{name}_packs_of_80", cases.QWEN3, packs))
    for kind in ("broadcast", "dead_rank"):  # the latter at the end
        jobs.append({"name": kind, "hf": cases.QWEN3, "layout": cases.LAYOUTS["dp2"], "kind": kind})
    return cases.run_ranks(2, jobs, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.parametrize("case", [*cases.FAMILIES, *(f"qwen2_{at}" for at in cases.LAYOUTS)])
def test_logprobs_are_those_of_transformers(
    case: str, one: dict[str, Any], two: dict[str, Any], folders: dict[str, Path]
) -> None:
    found, family = (one[case], case) if case in cases.FAMILIES else (two[case], "qwen2")
    torch.testing.assert_close(
        cases.matrix(found), cases.transformers_logprobs(folders[family]), rtol=0, atol=3e-5
    )


def test_logprobs_among_kept_tokens_are_those_of_transformers(
    one: dict[str, Any], folders: dict[str, Path]
) -> None:
    batch = cases.with_kept(cases.make_batch())
    wanted = cases.transformers_logprobs(folders["qwen2"], batch)
    plain = cases.transformers_logprobs(folders["qwen2"])
    found = cases.matrix(one["kept_qwen2"])
    torch.testing.assert_close(found, wanted, rtol=0, atol=3e-5)
    assert (found - plain).abs().max() > 1


def test_what_the_policy_would_not_have_kept_is_counted(
    one: dict[str, Any], two: dict[str, Any]
) -> None:
    steps = [
        case["steps"]
        for case in (one["kept"], *(two[f"kept_{layout}"] for layout in cases.LAYOUTS))
    ]
    for name in ("rollout_corr/outside_support", "rollout_corr/kept_log_mass"):
        for same in zip(*steps, strict=True):
            assert [step[name] for step in same] == pytest.approx(
                [same[0][name]] * len(same), rel=1e-3
            )
    assert 0.5 < steps[0][0]["rollout_corr/outside_support"] < 1  # answers at random
    assert steps[0][0]["rollout_corr/kept_log_mass"] < -1


# (ranks, case, what it is like on one rank in one pack, to what)
ALIKE = [
    (2, f"{model}_{at}", model, 1e-4)
    for model in ("fp32", "untied", "kept")
    for at in cases.LAYOUTS
]
ALIKE += [(2, f"bf16_{at}", "bf16", 2e-2) for at in cases.LAYOUTS]
ALIKE += [(2, f"moe_{at}", "moe", 1e-4) for at in cases.EXPERT_LAYOUTS]
ALIKE += [(2, "one_kv_head", "one_kv_head", 1e-4)]  # tensor-parallel ranks share it
ALIKE += [(2, f"{at}_packs_of_80", "fp32", 1e-4) for at in ("dp2", "vp2")]
ALIKE += [(1, case, "fp32", 1e-4) for case in ("packs_of_80", "unpacked", *RECOMPUTED)]
# where ranks have decided each for its own machine, the driver's holds
ALIKE += [(2, "own_recompute", "fp32", 1e-4)]


@pytest.mark.parametrize(("ranks", "case", "wanted", "rel"), ALIKE)
def test_layouts_and_packs_train_alike(
    ranks: int, case: str, wanted: str, rel: float, one: dict[str, Any], two: dict[str, Any]
) -> None:
    found = (one if ranks == 1 else two)[case]
    there = one[wanted]
    torch.testing.assert_close(cases.matrix(found), cases.matrix(there), rtol=0, atol=10 * rel)
    assert len(found["steps"]) == len(there["steps"]) == STEPS
    for step, its in zip(found["steps"], there["steps"], strict=True):
        for key in ("loss/total", "loss/entropy", "optim/grad_norm", "optim/lr"):
            assert step[key] == pytest.approx(its[key], rel=rel), key
    torch.testing.assert_close(
        cases.matrix(found, "after"), cases.matrix(there, "after"), rtol=0, atol=20 * rel
    )


def test_training_moves_the_policy(one: dict[str, Any]) -> None:
    """Guards the comparisons above: they would also hold for a learner that does nothing."""
    for case in ("fp32", "bf16", "untied", "moe"):
        moved = (cases.matrix(one[case], "after") - cases.matrix(one[case])).abs().max()
        assert moved > 0.05, case
        assert one[case]["steps"][0]["optim/grad_norm"] > 0.05, case
    losses = [step["loss/total"] for step in one["bf16"]["steps"]]
    assert losses[-1] < losses[0]


def transformers_activations(hf: dict[str, Any], folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest magnitude of each norm's output and of attention's cached values, over real tokens.

    [layer, norm, channel] and [layer, (key, value)].
    """
    from megatron_rl.learner.weights import random_tensors
    from megatron_rl.models.hf_folder import write_folder
    from megatron_rl.models.layout import Layout
    from megatron_rl.models.mapping import params
    from megatron_rl.models.model import Model

    model = Model.of(hf, Layout())
    shape = model.shape
    get = random_tensors(model, 7)
    tensors = {name: get(name) for param in params(shape) for name in param.hf}
    write_folder(folder, tensors, hf)
    reference = cases.reference(folder)
    amax_LNH = torch.zeros(shape.layers, 2, shape.hidden)
    cache_L2 = torch.zeros(shape.layers, 2)

    def watch(place_H: torch.Tensor, norm: torch.nn.Module) -> None:
        def see(_: torch.nn.Module, __: Any, out: torch.Tensor) -> None:
            place_H.copy_(torch.maximum(place_H, out.flatten(0, 1).abs().amax(0)))

        norm.register_forward_hook(see)

    for layer, block in enumerate(reference.model.layers):
        watch(amax_LNH[layer, 0], block.input_layernorm)
        watch(amax_LNH[layer, 1], block.post_attention_layernorm)
    batch = cases.make_batch()
    lengths_B = batch.prompt_lengths_B + batch.response_lengths_B
    with torch.no_grad():
        for tokens_S, length in zip(batch.tokens_BS, lengths_B, strict=True):
            cached = reference(tokens_S[None, :length], use_cache=True).past_key_values
            for layer, of_layer in enumerate(cached.layers):
                seen_2 = torch.stack([of_layer.keys.abs().amax(), of_layer.values.abs().amax()])
                cache_L2[layer] = torch.maximum(cache_L2[layer], seen_2)
    return amax_LNH, cache_L2


@pytest.mark.parametrize(("model", "layouts"), SEEN.items())
def test_every_layout_sees_the_same_activations(
    model: str, layouts: list[str], one: dict[str, Any], two: dict[str, Any], tmp_path: Path
) -> None:
    found = {"one": one[f"activations_{model}_one"]} | {
        at: two[f"activations_{model}_{at}"] for at in layouts
    }
    wanted_LNH, cache_L2 = transformers_activations(cases.MODELS[model], tmp_path / "hf")
    assert (wanted_LNH > 0).all()
    for at, case in found.items():
        torch.testing.assert_close(
            torch.tensor(case["amax"]), wanted_LNH, rtol=1e-4, atol=1e-5, msg=at
        )
        assert not case["unseen"], at
        assert not case["left"], at
        torch.testing.assert_close(
            torch.tensor(case["cache"]), cache_L2, rtol=1e-4, atol=1e-5, msg=at
        )
        assert not case["cache_unseen"], at
        assert all(amax > 0 for layer in case["cache_trained"] for amax in layer), at


@pytest.mark.parametrize("layout", ["one", *cases.LAYOUTS, *MEASURED_ONCE])
def test_an_update_s_own_forward_pass_stands_for_the_one_before_it(
    layout: str, one: dict[str, Any], two: dict[str, Any]
) -> None:
    """Maxima are taken of each norm and each cache once in a micro-batch, whether activations are
    recomputed or not.
    """
    scored, own = (
        (one if layout.startswith("one") else two)[f"once_{layout}_{scored}"]
        for scored in (True, False)
    )
    caches = {"CacheStats": 1} if layout in MEASURED_ONCE else {}
    assert (scored.pop("looks"), own.pop("looks")) == (caches, {"ActivationStats": 2, **caches})
    assert own == scored
    assert (
        own["metrics"]["loss/ratio_mean"] == pytest.approx(1, abs=1e-6)
        and own["metrics"]["optim/grad_norm"] > 0
    )


def transformers_experts(folder: Path) -> torch.Tensor:
    """[row, position, layer, expert]: what each token is sent to; -1 where there is none."""
    model = cases.reference(folder)
    batch = cases.make_batch()
    chosen = torch.full((*batch.tokens_BS.shape, 4, 2), -1)
    for row, length in enumerate((batch.prompt_lengths_B + batch.response_lengths_B).tolist()):
        with torch.no_grad():
            said = model(
                batch.tokens_BS[row : row + 1, :length], output_router_logits=True
            ).router_logits
        for layer, logits_SE in enumerate(said):
            chosen[row, :length, layer] = logits_SE.view(length, -1).topk(2).indices
    return chosen


@pytest.mark.parametrize("layout", ["one", *cases.EXPERT_LAYOUTS])
def test_router_flips_are_counted_layer_by_layer(
    layout: str, one: dict[str, Any], two: dict[str, Any]
) -> None:
    same, exchanged, silent = (one if layout == "one" else two)[f"flips_{layout}"]["found"]
    batch = cases.make_batch()
    tokens = int((batch.prompt_lengths_B + batch.response_lengths_B).sum())
    assert same == {"sync/router_flips": 0} | {
        f"sync/router_flips/layer_{layer}": 0 for layer in range(4)
    }
    assert exchanged["sync/router_flips"] == pytest.approx(2 / (4 * tokens))
    by_layer = [exchanged[f"sync/router_flips/layer_{layer}"] * tokens for layer in range(4)]
    assert by_layer == pytest.approx([1, 0, 0, 1], abs=1e-3)
    assert silent == {}


def test_entropy_bonus_raises_entropy(one: dict[str, Any]) -> None:
    assert one["entropy"]["steps"][-1]["loss/entropy"] > one["fp32"]["steps"][-1]["loss/entropy"]


def test_the_kl_of_rejected_rows_is_computed_where_it_counts(one: dict[str, Any]) -> None:
    assert "loss/kl" not in one["trained"]
    assert one["trained"]["optim/grad_norm"] == 0.0
    assert one["counted"]["loss/kl"] == pytest.approx(math.exp(-0.5) - 0.5, rel=1e-4)
    assert one["counted"]["loss/policy"] == 0.0
    assert one["counted"]["optim/grad_norm"] > 0.0


def test_what_cannot_work_is_refused_by_name(one: dict[str, Any]) -> None:
    for case, (_, _, said) in REFUSED.items():
        assert said in one[f"no_{case}"], case


@pytest.mark.parametrize("name", ORDERED)
def test_another_order_of_ranks_than_megatron_s_is_refused(name: str, two: dict[str, Any]) -> None:
    """Such a rank would load one shard and send another."""
    ours, megatrons = re.findall(r"Place\([^)]*\)", two[f"order_{name}"])
    assert ours != megatrons == str(Place())


@pytest.mark.parametrize("case", ["raise", "skip"])
def test_a_non_finite_loss_leaves_the_policy_alone(case: str, one: dict[str, Any]) -> None:
    found = one[case]
    assert found["unchanged"]
    assert found["next"]["optim/skipped"] == 0.0
    assert found["next"]["optim/grad_norm"] > 0
    if case == "raise":
        assert "learner.on_nonfinite" in found["error"]
    else:
        assert found["metrics"]["optim/skipped"] == 1.0
        assert found["error"] == ""


def test_the_driver_reaches_every_rank(two: dict[str, Any]) -> None:
    assert two["broadcast"] == {"same": 2.0, "rank_0": 1.0, "rank_1": 1.0}


def test_a_dead_rank_does_not_hang_the_others(two: dict[str, Any]) -> None:
    assert two["dead_rank"]
