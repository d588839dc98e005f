"""Chunked logits: equal to full ones on every layout, in bounded memory."""

import learner_cases as cases
import pytest
from learner_cases import Fields

pytestmark = pytest.mark.ranks
STEPS = 2
LARGE = {"vocab_size": 18992, "hidden_size": 512}  # an eighth of 151,936 and 4,096
MODELS = {"tied": cases.QWEN3, "own": cases.QWEN2}
# what a loss asks of the logits
ASKED = {
    "plain": {},
    "kept": {"kept": True},
    "entropy": {"entropy_coef": 0.1},
    "both": {"kept": True, "entropy_coef": 0.1},
}
PRECISIONS = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "fp32 head": {"precision": "bf16", "head": "fp32"},
}
LAYOUTS = ("one", "tp2", "tp2_sp", "pp2", "vp2", "dp2")
CASES = [("one", model, asked) for model in MODELS for asked in ASKED]
CASES += [(at, *case) for at in LAYOUTS[1:] for case in (("tied", "plain"), ("own", "both"))]
WIDE = ("one", "tp2_sp")  # where values and gradients of the head alone are compared


def _jobs(at: str) -> list[Fields]:
    layout = cases.PACKS | cases.LAYOUTS.get(at, {})
    jobs = []
    for where, model, asked in CASES:
        job = {"hf": MODELS[model], "layout": layout, "steps": STEPS, **ASKED[asked]}
        for columns in (None, 7) if where == at else ():
            jobs.append({**job, "name": f"{at} {model} {asked} {columns}", "columns": columns})
    for precision, fields in PRECISIONS.items() if at in WIDE else ():
        job = {"hf": cases.QWEN3, "kind": "heads", "layout": layout, "forward": "bf16", **fields}
        for kept in (False, True):
            jobs.append({**job, "name": f"{at} {precision} {kept}", "kept": kept})
    return jobs


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    wide = {**cases.QWEN2, **LARGE, "num_hidden_layers": 1, "tie_word_embeddings": True}
    memory = {"name": "memory", "kind": "head_memory", "hf": wide, "precision": "bf16"}
    two = [job for at in LAYOUTS[1:] for job in _jobs(at)]
    return cases.run(tmp_path_factory, [*_jobs("one"), memory], two)


@pytest.mark.parametrize(("at", "model", "asked"), CASES)
def test_every_layout_learns_what_it_learns_with_held_logits(
    at: str, model: str, asked: str, found: Fields
) -> None:
    held, here = (found[f"{at} {model} {asked} {columns}"] for columns in (None, 7))
    cases.close(here, held, 1e-5)
    # Adam's first steps make much of what rounding leaves of a gradient of zero
    cases.close(here, held, 1e-3, "after")
    assert here["after"] != here["logprobs"]
    for ours, theirs, tolerance in zip(here["steps"], held["steps"], (1e-5, 1e-4), strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance / 10)
        assert ("kept" in ASKED[asked]) == any("support" in name for name in ours)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("at", WIDE)
def test_values_and_gradients_are_those_of_held_logits(
    at: str, precision: str, kept: bool, found: Fields
) -> None:
    """In BF16 products of other widths may be summed in another order, and the hidden states'
    gradient is rounded once for each piece of the vocabulary.
    """
    pieces = found[f"{at} {precision} {kept}"]
    assert len(pieces) > 8
    for piece in pieces:
        assert piece["size"] > 0.1
        assert piece["padding"] == 0
        exact = precision != "bf16"
        for name in piece.keys() - {"size", "padding", "of_hidden", "of_weight"}:
            assert piece[name] < (1e-5 if exact else 0.05), name
        for name in ("of_hidden", "of_weight"):
            assert piece[name] < (1e-5 if precision == "fp32" else 0.04) * max(1, piece["size"]), (
                name
            )


def test_memory_of_the_largest_vocabulary_in_small(found: Fields) -> None:
    assert found["memory"]["held"] > 2
    assert found["memory"]["not"] < 0.2
