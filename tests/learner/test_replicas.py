"""Gradients that travel while backward goes on: the same sums, no earlier than they are whole."""

import learner_cases as cases
import pytest
import torch
from learner_cases import Fields
from safetensors.torch import load_file

from megatron_rl.config.schema import OptimSection
from megatron_rl.learner.modules import cpu
from megatron_rl.learner.optimizer import replicas_config

pytestmark = pytest.mark.ranks
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 20_000}  # several buckets of a tiny model
# name -> (config.json, learner section, precision)
CASES = {
    "dp2": (cases.QWEN3, {"data_parallel": 2, **cases.PACKS}, "fp32"),
    "dp2_bf16": (cases.QWEN3, {"data_parallel": 2, **cases.PACKS}, "bf16"),
    "dp2_recompute": (
        cases.QWEN3,
        {"data_parallel": 2, **cases.PACKS, "megatron": cases.RECOMPUTE},
        "fp32",
    ),
    "ep2_experts": (
        cases.QWEN3_MOE,
        {**cases.EXPERT_LAYOUTS["ep2"], **cases.PACKS},
        "fp32",
    ),
    "vp2": (cases.QWEN3, cases.LAYOUTS["vp2"], "fp32"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    folder = tmp_path_factory.mktemp("replicas")
    jobs = []
    for name, (hf, layout, precision) in CASES.items():
        for way, optim in (("plain", {}), ("overlap", OVERLAP)):
            jobs.append(
                {
                    "name": f"{name} {way}",
                    "kind": "replicas",
                    "hf": hf,
                    "layout": layout,
                    "precision": precision,
                    "optim": optim,
                    "steps": 3,
                    "gradients": str(folder / f"{name}_{way}"),
                }
            )
    written = {
        "hf": cases.QWEN3,
        "layout": CASES["dp2"][1],
        "kind": "checkpoint",
        "wrote": 2,
    }
    written["checkpoint"] = str(folder / "checkpoint")
    jobs.append({**written, "name": "wrote", "optim": OVERLAP, "reads": False})
    jobs += [
        {**written, "name": f"read {optim}", "optim": optim, "reads": True}
        for optim in (OVERLAP, {})
    ]
    return {**cases.run_ranks(2, jobs, folder), "folder": folder}


@pytest.mark.parametrize("case", CASES)
def test_the_sums_are_the_same(case: str, found: Fields) -> None:
    plain = found[f"{case} plain"]
    overlap = found[f"{case} overlap"]
    for rank in range(2):
        wanted = load_file(found["folder"] / f"{case}_plain.{rank}")
        sums = load_file(found["folder"] / f"{case}_overlap.{rank}")
        assert wanted.keys() == sums.keys()
        assert any(value.any() for value in wanted.values())
        for name, value in wanted.items():
            if name.startswith("0."):
                # to the last bit, from the same weights
                assert torch.equal(sums[name], value), name
            else:
                torch.testing.assert_close(
                    sums[name],
                    value,
                    rtol=1e-4,
                    atol=1e-6,
                    msg=name,
                )
    cases.same_steps(overlap, plain, rtol=1e-5, atol=1e-7)
    assert overlap["steps"][0]["loss/total"] == plain["steps"][0]["loss/total"]
    assert overlap["steps"][0]["optim/grad_norm"] > 0
    assert overlap["buckets"] > 2
    cases.close(overlap, plain, 1e-4, "after")


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_overlap_by_default_between_gpus(
    count: int, on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "ON_CPU", on_cpu)
    made = replicas_config(OptimSection(megatron={"clip_grad": 0.5}), count)
    assert made.overlap_grad_reduce == (count > 1 and not on_cpu)


def test_a_checkpoint_of_many_buckets_is_any_learner_s(found: Fields) -> None:
    assert found[f"read {OVERLAP}"] == found["wrote"]
    cases.same_steps(found["read {}"], found["wrote"], rtol=1e-5, atol=1e-7)
