"""Limits of Transformer Engine's FP8 products on packs, and the scale formats of the learner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import QWEN3, make_batch

from megatron_rl.config.schema import LearnerSection, LoraSection
from megatron_rl.learner.modules import limits
from megatron_rl.learner.modules.packing import pack
from megatron_rl.models.shape import ModelShape

HF = {**QWEN3, "hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
SHAPE = ModelShape.from_hf(HF)


def learner(recipe: str | None = None, tp: int = 1, **megatron: object) -> LearnerSection:
    return LearnerSection(
        tensor_parallel=tp, megatron={"fp8": "e4m3", "fp8_recipe": recipe, **megatron}
    )


@given(
    st.sampled_from(
        [
            ("tensorwise", 16),
            ("blockwise", 128),
            ("mxfp8", 32),
            (None, 128),
        ]
    ),
    st.sampled_from([1, 2, 4, 8]),
    st.booleans(),
    st.sets(st.integers(0, 13), max_size=14),
)
def test_every_rank_s_tokens_are_whole_tiles(
    recipe: tuple[str | None, int], tp: int, sequence_parallel: bool, rows: set[int]
) -> None:
    """A rank's tokens feed every product; the group's tokens feed the backward pass's sums."""
    name, tile = recipe
    section = learner(name, tp, sequence_parallel=sequence_parallel)
    made = pack(make_batch(), sorted(rows), limits.pack_multiple(section))
    shares = tp if sequence_parallel and tp > 1 else 1
    assert len(made.tokens_S) % shares == 0
    assert len(made.tokens_S) // shares % tile == 0
    assert len(made.tokens_S) - made.tokens <= tile * shares


def test_a_learner_without_fp8_pads_for_its_ranks_alone() -> None:
    assert limits.pack_multiple(LearnerSection(tensor_parallel=4)) == 1
    section = LearnerSection(tensor_parallel=4, megatron={"sequence_parallel": True})
    assert limits.pack_multiple(section) == 4


def test_scales_of_the_present_tensor_are_taken_and_those_of_the_past_refused() -> None:
    assert limits.fp8_recipe(learner()) == "blockwise"
    for name in (None, "blockwise", "tensorwise", "mxfp8"):
        assert not [*limits.fp8_shares(SHAPE, learner(name))]
    for name in ("delayed", "custom"):
        (found,) = limits.fp8_shares(SHAPE, learner(name))
        assert found.startswith(f"learner.megatron.fp8_recipe: {name}")


@pytest.mark.parametrize(("field", "value"), [("cp_comm_type", "a2a"), ("fp8_param", True)])
def test_fields_that_the_learner_decides_are_refused(field: str, value: object) -> None:
    (found,) = limits.passed_through(LearnerSection(megatron={field: value}), SHAPE)
    assert found.startswith(f"learner.megatron.{field}: ")


@pytest.mark.parametrize(
    "targets",
    [
        ["q_prj"],
        ["q_proj", "down_proj"],
        ["all-linear"],
    ],
)
def test_adapters_are_beside_layers_that_there_are(targets: list[str]) -> None:
    section = LearnerSection(lora=LoraSection(rank=4, targets=targets))
    found = [*limits.problems(SHAPE, HF, section)]
    assert len(found) == (targets == ["q_prj"])
    assert all(one.startswith("learner.lora.targets: q_prj") for one in found)
