"""Bias of each weight, over a table of logits whose every sequence can be listed."""

import correction_statistics as lab
import pytest


@pytest.mark.parametrize("noise", [0.1, 0.3, 1.0])
def test_product_weights_are_unbiased_and_the_others_are_not(noise: float) -> None:
    """Over all sequences, exactly: no Monte Carlo error to hide in."""
    toy = lab.make_toy(noise)
    bias = {
        name: lab.relative_bias(toy, weight, lab.mean_reward(toy))
        for name, weight in lab.KINDS.items()
    }
    assert bias["sequence, product"] < 1e-5
    assert lab.relative_bias(toy, lab.SEQUENCE, baseline=0.0) < 1e-5
    assert 0.6 * noise < bias["token"] < bias["no correction"]
    assert bias["sequence, geometric"] > noise / 2
