"""Limits of Transformer Engine's FP8 products on packs, and the scale formats of the learner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import make_batch

from megatron_rl.config.schema import LearnerSection, LoraSection
from megatron_rl.learner.modules import limits
from megatron_rl.learner.modules.packing import pack
from megatron_rl.models.shape import ModelShape

HF = {
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
}


def learner(recipe: str | None = None, tp: int = 1, **megatron: object) -> LearnerSection:
    return LearnerSection(
        tensor_parallel=tp, megatron={"fp8": "e4m3", "fp8_recipe": recipe, **megatron}
    )


def refused(section: LearnerSection) -> list[str]:
    return list(limits.fp8_shares(ModelShape.from_hf(HF), section))


@given(
    st.sampled_from([("tensorwise", 16), ("blockwise", 128), ("mxfp8", 32), (None, 128)]),
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
    assert (
        limits.pack_multiple(
            LearnerSection(tensor_parallel=4, megatron={"sequence_parallel": True})
        )
        == 4
    )


def test_scales_of_the_present_tensor_are_taken_and_those_of_the_past_refused() -> None:
    assert limits.fp8_recipe(learner()) == "blockwise"
    assert not any(
        refused(learner(recipe)) for recipe in (None, "blockwise", "tensorwise", "mxfp8")
    )
    for name in ("delayed", "custom"):
        (found,) = refused(learner(name))
        assert found.startswith(f"learner.megatron.fp8_recipe: {name}")


def test_what_ranks_that_share_sequences_do_not_do() -> None:
    section = LearnerSection(context_parallel=2, megatron={"cp_comm_type": "a2a"})
    (found,) = limits.passed_through(section, ModelShape.from_hf(HF))
    assert found.startswith("learner.megatron.cp_comm_type: ")


def test_weights_kept_in_fp8_are_refused() -> None:
    (found,) = limits.passed_through(learner(fp8_param=True), ModelShape.from_hf(HF))
    assert found.startswith("learner.megatron.fp8_param: ")


@pytest.mark.parametrize("targets", [["q_prj"], ["q_proj", "down_proj"], ["all-linear"]])
def test_adapters_are_beside_layers_that_there_are(targets: list[str]) -> None:
    section = LearnerSection(lora=LoraSection(rank=4, targets=targets))
    found = [*limits.problems(ModelShape.from_hf(HF), HF, section)]
    assert len(found) == (targets == ["q_prj"])
    assert all(one.startswith("learner.lora.targets: q_prj") for one in found)
