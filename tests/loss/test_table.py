"""The table says of every loss what its formula does, and the guide says the same."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from test_loss import CONFIGS, example

from megatron_rl.config.schema import LossConfig, LossName
from megatron_rl.loss.covariance import select_by_covariance
from megatron_rl.loss.policy_loss import policy_loss
from megatron_rl.loss.table import LOSSES

ROOT = Path(__file__).parents[2]
COMMON = {
    "name",
    "reduction",
    "kl_coef",
    "kl_estimator",
    "entropy_coef",
    "kl_on",
    "kl_to",
    "kl_cap",
}


class Watched:
    """A config that notes which of its keys are read."""

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self.read = set[str]()

    def __getattr__(self, key: str) -> Any:
        self.read.add(key)
        return getattr(self.config, key)


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_reads(name: str) -> None:
    read: set[str] = set()
    for config in (one for one in CONFIGS.values() if one.name == name):
        watched: Any = Watched(config)
        inputs = example()
        policy_loss(inputs, watched)
        select_by_covariance(
            inputs.anchor_logprobs_BT, inputs.advantages_B, inputs.mask_BT, watched, seed=1
        )
        read |= watched.read
    assert read - COMMON == set(LOSSES[name].reads)


def test_every_key_of_the_section_belongs_to_a_loss_or_to_all() -> None:
    assert {key for loss in LOSSES.values() for key in loss.reads} | COMMON == {
        field.name for field in fields(LossConfig)
    }
    assert list(LossName) == list(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_the_metrics_and_the_selection_follow_the_table(name: str) -> None:
    inputs = example()
    config = next(one for one in CONFIGS.values() if one.name == name)
    _, metrics = policy_loss(inputs, config)
    assert ("loss/ratio_mean" in metrics) == (not LOSSES[name].supervised)
    chosen = select_by_covariance(
        inputs.anchor_logprobs_BT, inputs.advantages_B, inputs.mask_BT, config, seed=1
    )
    assert (
        (chosen is not None) == ("loss/selected_fraction" in metrics) == bool(LOSSES[name].selects)
    )


def test_the_guide_has_a_row_for_each_loss_with_its_keys() -> None:
    guide = (ROOT / "docs" / "corrections.md").read_text()
    found = dict(
        re.findall(
            r"^\| `(\w+)`[^|]*\|(.*)\|$",
            guide.split("| `loss.name` |")[1].split("\n\n")[0],
            re.MULTILINE,
        )
    )
    assert list(found) == list(LOSSES)
    for name, loss in LOSSES.items():
        words = set(re.findall(r"\w+", found[name]))
        inherited = set(LOSSES["ppo"].reads) if "ppo" in words else set()
        assert set(loss.reads) <= words | inherited, name
