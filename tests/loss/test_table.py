"""The table says of every loss what its formula does."""

from dataclasses import fields
from typing import Any

import pytest
from matrices import policy_loss
from test_loss import CONFIGS, example, select

from megatron_rl.config.schema import LossConfig, LossName, LossParams
from megatron_rl.loss.table import LOSSES

COMMON = {
    "params",
    "name",
    "reduction",
    "kl_coef",
    "kl_estimator",
    "entropy_coef",
    "kl_on",
    "kl_to",
    "kl_cap",
}


class Watched(dict[str, Any]):
    """Values that note which of them are read."""

    def __init__(self, values: dict[str, Any], read: set[str], prefix: str = "") -> None:
        super().__init__(values)
        self._read = read
        self._prefix = prefix

    def __getitem__(self, key: str) -> Any:
        self._read.add(f"{self._prefix}{key}")
        return super().__getitem__(key)

    def __getattr__(self, key: str) -> Any:
        return self[key]


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_loss_reads(name: str) -> None:
    read: set[str] = set()
    for config in (one for one in CONFIGS.values() if one.name == name):
        params = Watched(config.params, read, "params.")
        watched: Any = Watched(vars(config) | {"params": params, "needs_reference": False}, read)
        inputs = example()
        policy_loss(inputs, watched)
        select(inputs.anchor_logprobs_BT, inputs.advantages_B, inputs.mask_BT, watched, seed=1)
    assert read - COMMON == set(LOSSES[name].keys)


def test_every_key_of_the_section_belongs_to_a_loss_or_to_all() -> None:
    own = {key for loss in LOSSES.values() for key in loss.keys}
    known = {field.name for field in fields(LossConfig)}
    known |= {f"params.{field.name}" for field in fields(LossParams)}
    assert own | COMMON == known
    assert list(LossName) == list(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_the_metrics_and_the_selection_follow_the_table(name: str) -> None:
    inputs = example()
    config = next(one for one in CONFIGS.values() if one.name == name)
    _, metrics = policy_loss(inputs, config)
    assert ("loss/ratio_mean" in metrics) == (not LOSSES[name].supervised)
    chosen = select(inputs.anchor_logprobs_BT, inputs.advantages_B, inputs.mask_BT, config, seed=1)
    assert (
        (chosen is not None) == ("loss/selected_fraction" in metrics) == bool(LOSSES[name].selects)
    )
