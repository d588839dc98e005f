"""Names that no translator reads: those that may be about correction are errors, known others are left out."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_rl.workshop.translation.settings import LEFT_OUT_NAMES, may_correct
from megatron_rl.workshop.translation.translate import FRAMEWORKS, TranslationError, translate

REQUIRED: dict[str, dict[str, Any]] = {"prime_rl": {"trainer.loss.kl_tau": 0}}  # without which nothing translates
SUSPECTS = ["vllm_enable_is_correction", "actor.newTisCap", "my-icepop", "x.rs_settings.level", "staleness_limit"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", SUSPECTS)
def test_an_unknown_name_that_may_be_about_correction_is_an_error(framework: str, name: str) -> None:
    """It names the key and the nearest name that is known; a key that holds nothing asks for nothing."""
    rest = {"model.path": "x", "data.seed": 1} | REQUIRED.get(framework, {})
    with pytest.raises(TranslationError, match=f"^{framework}: {name.replace('-', '_')}: .*nearest.* is [a-z_0-9]+;"):
        translate(framework, rest | {name: True})
    assert translate(framework, rest | {name: None}) == translate(framework, rest)


def test_the_nearest_name_is_the_one_that_was_meant() -> None:
    with pytest.raises(TranslationError, match="nearest that is known is enable_vllm_is_correction"):
        translate("openrlhf", {"vllm_enable_is_correction": True})


@pytest.mark.parametrize(
    ("name", "suspect"),
    [
        ("use_tis", True),
        ("useTisNow", True),
        ("TISCap", True),
        ("vllm-is", True),
        ("masked_tokens", True),
        ("history", False),
        ("params", False),
        ("rsync", False),
        ("this_misc", False),
        ("klein", False),
    ],
)
def test_words_of_a_name(name: str, suspect: bool) -> None:
    assert may_correct(name) == suspect


# what their own recipes hold beside a correction
INNOCENT: dict[str, dict[str, Any]] = {
    "verl": {
        "actor_rollout_ref.actor": {"clip_ratio_c": 3.0, "use_kl_loss": True, "grad_clip": 1.0, "loss_scale_factor": 1},
        "algorithm": {"kl_ctrl": {"kl_coef": 0.1}, "use_kl_in_reward": False},
        "critic": {"cliprange_value": 0.5, "loss_agg_mode": "token-mean", "loss_type": "x"},
        "distillation.distillation_loss": {"use_policy_gradient": True, "policy_loss_mode": "vanilla"},
        "async_training.staleness_threshold": 1,
    },
    "skyrl": {
        "trainer.algorithm": {"eps_clip_low": 0.2, "kl_loss_coef": 0.1, "loss_reduction": "x", "value_clip": 1.0},
        "trainer.fully_async.max_staleness_steps": 4,
    },
    "trl": {"max_grad_norm": 1.0, "mask_truncated_completions": True, "importance_sampling_level": "token"},
    "nemo_rl": {"loss_fn": {"ratio_clip_min": 0.2, "kl_input_clamp_value": 20}, "policy": {"clip_grad": 1.0}},
    "areal": {"actor": {"eps_clip": 0.2, "kl_ctl": 0.0, "optimizer.gradient_clipping": 1.0, "reward_clip": 20.0}},
    "slime": {"eps_clip_high": 0.28, "kl_loss_type": "k3", "loss_mask_type": "qwen", "clip_grad": 1.0},
    "openrlhf": {
        "actor": {"dual_clip": 3, "aux_loss_coef": 0.1},
        "algo.kl": {"init_coef": 0.1},
        "reward.clip_range": 1,
    },
    "fireworks": {"x.kl_beta": 0.1, "x.grad_clip_norm": 1.0, "x.mask_prompt": True},
    "prime_rl": {"trainer.loss.kl_tau": 0, "x.action_loss_type": "default", "trainer.optim.max_norm": 1.0},
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_their_losses_and_optimizers_are_left_out(framework: str) -> None:
    assert "left out" in translate(framework, INNOCENT[framework]).notes[-1]


def test_every_framework_has_a_list_of_suspects_alone() -> None:
    assert set(FRAMEWORKS) <= set(LEFT_OUT_NAMES)
    for names in LEFT_OUT_NAMES.values():
        assert [name for name in names if not may_correct(name)] == []
