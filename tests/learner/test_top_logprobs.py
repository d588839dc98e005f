"""Logprobs of the sampler's top tokens, and gradients through them: on every layout those of a
plain log_softmax over one rank's whole logits.
"""

from pathlib import Path

import learner_cases as cases
import pytest
from learner_cases import Fields
from safetensors.torch import load_file

pytestmark = pytest.mark.ranks
KEPT = {"kept": True}
FEW = {"columns": 7}  # of logits at once
# name -> (ranks, config.json, learner section, what else the job says)
CASES: dict[str, tuple[int, Fields, Fields, Fields]] = {
    "one": (1, cases.QWEN3, cases.PACKS, {}),
    "one_columns": (1, cases.QWEN3, cases.PACKS, FEW),
    "one_kept": (1, cases.QWEN3, cases.PACKS, KEPT),
    "one_kept_columns": (1, cases.QWEN3, cases.PACKS, KEPT | FEW),
    "one_recompute": (1, cases.QWEN3, {"recompute": "full"}, {}),
    "one_pack": (1, cases.QWEN3, {}, {}),
    **{at: (2, cases.QWEN3, layout, {}) for at, layout in cases.LAYOUTS.items()},
    "tp2_columns": (2, cases.QWEN3, cases.LAYOUTS["tp2"], FEW),
    "tp2_sp_kept": (2, cases.QWEN3, cases.LAYOUTS["tp2_sp"], KEPT),
    "tp2_kept_columns": (2, cases.QWEN3, cases.LAYOUTS["tp2"], KEPT | FEW),
    "vp2_packs": (2, cases.QWEN3, cases.LAYOUTS["vp2"] | cases.PACKS, {}),
    "cp2": (2, cases.QWEN3, cases.CP2, {}),
    "cp2_kept": (2, cases.QWEN3, cases.CP2, KEPT),
    "ep2": (2, cases.QWEN3_MOE, cases.EXPERT_LAYOUTS["ep2"], {}),
    "tp2_ep2": (2, cases.QWEN3_MOE, cases.EXPERT_LAYOUTS["tp2_ep2"], {}),
}
PLAIN = {"dense": cases.QWEN3, "experts": cases.QWEN3_MOE}


def _plain(case: str) -> str:
    _, hf, _, more = CASES[case]
    kind = "experts" if hf is cases.QWEN3_MOE else "dense"
    return f"{kind}_kept" if "kept" in more else kind


def _job(folder: Path, name: str, hf: Fields, layout: Fields, more: Fields) -> Fields:
    optim = {"clip_grad": 0.0}
    job = {"name": name, "kind": "top", "hf": hf, "layout": layout, "optim": optim}
    return {**job, "out": str(folder / name), **more}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    folder = tmp_path_factory.mktemp("top")
    jobs: dict[int, list[Fields]] = {1: [], 2: []}
    for plain in sorted({_plain(case) for case in CASES}):
        more = {"plain": True} | (KEPT if "kept" in plain else {})
        jobs[1].append(_job(folder, plain, PLAIN[plain.split("_")[0]], {}, more))
    for name, (ranks, *rest) in CASES.items():
        jobs[ranks].append(_job(folder, name, *rest))
    results = cases.run(tmp_path_factory, *jobs.values())
    for name, result in results.items():
        result["gradients"] = load_file(folder / name / "gradients.safetensors")
    return results


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_a_plain_log_softmax(case: str, found: Fields) -> None:
    here = found[case]
    plain = found[_plain(case)]
    for name in ("logprobs", "top"):
        cases.close(here, plain, 1e-5, name)
    assert here["step"]["loss/top"] == pytest.approx(plain["step"]["loss/top"], rel=1e-5)
    assert here["gradients"].keys() == plain["gradients"].keys()
    largest = 0.0
    for name, wanted in plain["gradients"].items():
        cases.close(here["gradients"][name], wanted, 1e-5, rtol=1e-5)
        largest = max(largest, float(wanted.abs().max()))
    assert largest > 0.1
