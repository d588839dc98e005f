"""Tokens without a sampler logprob, tokens of older policies, and settings that are refused or said for them.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from translation_oracle import slime_mis

from megatron_rl.config.schema import Anchor, Level, NonFinite
from megatron_rl.rollout_correction import rollout_correction, without_stale
from megatron_rl.types import Prompt, Rollout, Scored, collate
from megatron_rl.workshop.translation.translate import TranslationError, translate

NAN, OLD = math.nan, "mask_offpolicy_in_partial_rollout"
PARTIAL = {"partial_rollout": True, OLD: True}
PROX_BT, MASK_BT = torch.full((3, 3), -1.0), torch.ones(3, 3, dtype=torch.bool)
# a row without one logprob, one whose sampler calls its token impossible, a whole one
FAULTY_BT = torch.tensor([[-1.4, NAN, -1.2], [-1.1, -1.1, -math.inf], [-1.0, -1.3, -1.1]])


@pytest.mark.parametrize("beside", [{}, {"rejection_sampling": {"upper": 2.0}}])
def test_areal_s_second_moments_drop_what_has_none(beside: dict[str, Any]) -> None:
    actor = {"use_decoupled_loss": True, "m2_threshold": 0.05, **beside}
    found = rollout_correction(PROX_BT, FAULTY_BT, MASK_BT, translate("areal", {"actor": actor}).config)
    expected = [[True, False, True], [True, True, False], [True, True, True]]
    assert found.mask_BT.tolist() == found.denominator_mask_BT.tolist() == expected


def test_areal_s_kl_of_a_row_says_what_it_divides_by() -> None:
    row = {"level": "sequence", "metric": "kl_k1", "upper": 1.0, "lower": -1.0}
    config, notes = translate("areal", {"rejection_sampling": row})
    assert any("leaves the denominators here, not AReaL's" in note for note in notes)
    found = rollout_correction(PROX_BT, FAULTY_BT, MASK_BT, config)
    assert found.mask_BT.any(dim=1).tolist() == [False, False, True]
    for other in ({"metric": "kl_k2"}, {"level": "sequence"}):
        assert not any("denominators" in note for note in translate("areal", {"rejection_sampling": other}).notes)


@pytest.mark.parametrize("corrects", [True, False])
def test_nemo_rl_s_row_error_that_is_no_number_is_too_large(corrects: bool) -> None:
    mapping = {"grpo.seq_logprob_error_threshold": 1.4, "loss_fn.use_importance_sampling_correction": corrects}
    config, notes = translate("nemo_rl", mapping)
    assert not any("without a sampler logprob" in note for note in notes)
    found = rollout_correction(PROX_BT, FAULTY_BT, MASK_BT, config)
    whole = [[False] * 3, [False] * 3, [True] * 3]
    assert found.mask_BT.tolist() == found.denominator_mask_BT.tolist() == whole


def test_areal_reuses_the_logprobs_of_its_update() -> None:
    rejection = {"rejection_sampling": {"upper": 2.0}, "use_decoupled_loss": True}
    reused = translate("areal", {"actor": {**rejection, "prox_logp_method": "reuse_train_logp"}})
    assert reused == translate("areal", {"actor": rejection})
    assert any("goes with learner.n_minibatches: 1" in note for note in reused.notes)
    # without the decoupled loss its ratio is that of the update to itself, but for SAPO's
    plain = {"use_decoupled_loss": False, "prox_logp_method": "reuse_train_logp"}
    assert translate("areal", {"actor": plain}).anchor == Anchor.prox
    assert translate("areal", {"actor": {**plain, "use_sapo_loss": True}}).anchor == Anchor.sampler


@pytest.mark.parametrize(
    ("framework", "mapping", "words"),
    [
        ("areal", {"actor": {"use_decoupled_loss": True, "use_sapo_loss": True}}, "use_sapo_loss is True: AReaL refu"),
        ("areal", {"actor": {"use_decoupled_loss": True, "prox_logp_method": "old"}}, "reuse_train_logp"),
        ("skyrl", {"trainer.algorithm.policy_loss_type": "repo_r"}, "policy_loss_type is 'repo_r': expected one of"),
        ("slime", {OLD: True, "partial_rollout": False}, f"{OLD} is True: slime ignores it without partial_rollout"),
        ("prime_rl", {"trainer": {"optim": {"lr": 1e-6}}}, "kl_tau: it is not given and 0.001 by default.*set it to 0"),
        ("prime_rl", {"loss": {"kl_tau": 1e-4}}, "kl_tau is 0.0001: .*; set it to 0"),
        ("prime_rl", {"kl_tau": 0, "adv_tau": 0.5}, "adv_tau is 0.5"),
        ("prime_rl", {"kl_tau": 0, "type": "ipo", "ipo_threshold": 0.1}, "type is 'ipo': "),
        ("prime_rl", {"trainer.loss": {"type": "custom", "kwargs": {"a": 1}}}, "type is 'custom': "),
        ("prime_rl", {"kl_tau": 0, "dppo_mask_hi": 0.1}, "did you mean dppo_mask_high"),
        ("prime_rl", {"kl_tau": 0, "teacher_tau": 1.0}, "teacher_tau is 1.0: no longer there"),
        ("prime_rl", {"trainer.loss.kl_tau": 0, "orchestrator.algo.type": "opd"}, "algo.type is 'opd'"),
        ("prime_rl", {"trainer.loss.kl_tau": 0, "a.source": [{"algo": {"type": "sft"}}]}, r"source\[0\].algo.type"),
    ],
)
def test_refused(framework: str, mapping: dict[str, Any], words: str) -> None:
    with pytest.raises(TranslationError, match=words):
        translate(framework, mapping)


def answer(sample: int, versions: list[int]) -> Scored:
    tokens = len(versions)
    given = ([1] * tokens, [-0.1 * (sample + 1)] * tokens, [1] * tokens, "stop", versions[0])
    return Scored(Rollout(Prompt(0, (1,), "", {}), 0, sample, *given, versions=versions), float(sample))


def test_slime_s_partial_rollouts_train_on_what_the_last_call_has_written() -> None:
    """A call that goes on with an answer zeroes the mask of what is there, and of answers that were complete."""
    calls = [[3, 3, 4, 4], [2, 2], [4, 4, 4]]
    batch = collate([answer(sample, versions) for sample, versions in enumerate(calls)])
    prox_BT = batch.sampler_logprobs_BT + torch.tensor([[2.0, 2.0, 0.1, 0.2], [0.0] * 4, [0.3] * 4])
    mapping = {**PARTIAL, **slime_mis(tis_upper_bound=1.5, tis_level="sequence", use_rs=True, rs_level="geometric")}
    config, notes = translate("slime", mapping)
    young, _ = without_stale(batch, config, version=4)
    theirs_BT = torch.tensor([[0, 0, 1, 1], [0] * 4, [1, 1, 1, 0]]).bool()
    assert torch.equal(young.mask_BT, theirs_BT)
    found = rollout_correction(prox_BT, young.sampler_logprobs_BT, young.mask_BT, config)
    weights_BT = torch.tensor([math.exp(0.3), 0.0, 1.5])[:, None] * theirs_BT
    torch.testing.assert_close(found.weights_BT, weights_BT)
    assert torch.equal(found.denominator_mask_BT, theirs_BT)
    assert any("train_async.py" in note for note in notes)
    assert any("mean over rows" in note for note in notes)


def test_slime_s_flag_alone_corrects_nothing_else() -> None:
    config, notes = translate("slime", {OLD: True})
    assert (config.weight.level, config.non_finite) == (Level.none, NonFinite.one)
    assert config.reject == translate("slime", PARTIAL).reject
    assert any("partial_rollout is not given and taken as true" in note for note in notes)
    assert translate("slime", {"partial_rollout": True, OLD: False}) == translate("slime", {})
