"""What `rollout_correction` refuses: tensors that broadcast, and words that would pass for another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loss_cases import BYPASS

from megatron_rl.config.schema import CorrectionConfig, RejectRule, WeightConfig
from megatron_rl.rollout_correction import rollout_correction

ZEROS_BT, MASK_BT = torch.zeros(4, 3), torch.ones(4, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("prox", "mu", "mask", "words"),
    [
        (slice(4), slice(4), slice(2), r"proximal logprobs are \[4, 3\] and the mask is \[2, 3\]"),
        (slice(4), slice(1), slice(4), r"sampler logprobs are \[1, 3\] and the mask is \[4, 3\]"),
        (slice(1), slice(4), slice(4), r"proximal logprobs are \[1, 3\]"),
        (None, slice(1), slice(4), r"sampler logprobs are \[1, 3\]"),
    ],
)
def test_every_position_needs_its_own_numbers(prox: slice | None, mu: slice, mask: slice, words: str) -> None:
    config = BYPASS if prox is None else CorrectionConfig()
    prox_BT = None if prox is None else ZEROS_BT[prox]
    with pytest.raises(ValueError, match=words):
        rollout_correction(prox_BT, ZEROS_BT[mu], MASK_BT[mask], config)


@pytest.mark.parametrize("shape", [(3,), (), (4, 1)])
def test_a_sampler_logprob_per_row_or_position_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one logprob and one mask entry"):
        rollout_correction(ZEROS_BT, torch.zeros(shape), MASK_BT, CorrectionConfig())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            CorrectionConfig(weight=WeightConfig(level="sentence")),
            "correction.weight.level is sentence: use one of none",
        ),
        (CorrectionConfig(weight=WeightConfig(aggregate="mean")), "correction.weight.aggregate is mean"),
        (CorrectionConfig(weight=WeightConfig(outside="mask")), "correction.weight.outside is mask"),
        (CorrectionConfig(non_finite="ignore"), "correction.non_finite is ignore"),
        (CorrectionConfig(anchor="rollout"), "correction.anchor is rollout"),
        (
            CorrectionConfig(reject=[RejectRule(level="row", stat="k1", high=1.0)]),
            r"correction.reject\[0\].level is row",
        ),
        (CorrectionConfig(reject=[RejectRule(stat="k4", high=1.0)]), r"reject\[0\].stat is k4"),
        (CorrectionConfig(reject=[RejectRule(stat="k1", reduce="median", high=1.0)]), "reduce is median"),
        (CorrectionConfig(reject=[RejectRule(stat="k1", reduce="sum", high=1.0, when="always")]), "when is always"),
    ],
)
def test_an_unknown_word_is_no_other_word(config: CorrectionConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rollout_correction(ZEROS_BT, ZEROS_BT, MASK_BT, config)
    bypass = replace(config, anchor="sampler") if config.anchor == "prox" else config
    with pytest.raises(ValueError, match=words):
        rollout_correction(None, ZEROS_BT, MASK_BT, bypass)
