"""Warmup and decay of the learning rate; offloading of the optimizer for an engine: equal bytes on
every layout, also in a checkpoint.
"""

import learner_cases as cases
import pytest
from learner_cases import Fields

from megatron_rl.config.schema import Decay, OptimSection
from megatron_rl.learner.optimizer import learning_rate

# of ten steps after a warmup of four, to step 12
RATES = {
    Decay.constant: [1.0] * 10,
    Decay.linear: [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2],
    Decay.cosine: [1, 0.969552, 0.882843, 0.753073, 0.6, 0.446927, 0.317157, 0.230448, 0.2, 0.2],
}
PLACES = [
    *((at, "dense", "bf16") for at in ("one", "tp2", "pp2", "vp2", "dp2")),
    *((at, "dense", "fp32") for at in ("one", "dp2")),
    *((at, "experts", "bf16") for at in ("ep2", "tp2_ep2")),
]


@pytest.mark.parametrize("decay", Decay)
def test_a_warmup_reaches_the_rate_on_its_last_step_and_a_decay_the_minimum(decay: Decay) -> None:
    optim = OptimSection(lr=1.0, min_lr=0.2, warmup_steps=4, decay=decay)
    rates = [learning_rate(optim, step, 12) for step in range(14)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, *RATES[decay]], abs=1e-5)
    assert learning_rate(OptimSection(lr=1.0, warmup_steps=0), 0, 10) == 1.0


def _job(at: str, model: str, precision: str, offload: str) -> Fields:
    return {
        "name": f"{at} {model} {precision} {offload}",
        "kind": "aside",
        "hf": cases.MODELS[model],
        "layout": cases.ALL_LAYOUTS.get(at, {}),
        "precision": precision,
        "offload": offload,
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Fields:
    jobs = [_job(*place, offload) for place in PLACES for offload in ("none", "optimizer")]
    one = [job for job in jobs if job["name"].startswith("one")]
    return cases.run(tmp_path_factory, one, [job for job in jobs if job not in one])


@pytest.mark.ranks
@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_updates_and_checkpoints_are_what_they_are_without(
    place: tuple[str, str, str], found: Fields
) -> None:
    name = " ".join(place)
    plain = found[f"{name} none"]
    offloaded = found[f"{name} optimizer"]
    assert len(plain["steps"]) == 3 and plain["steps"][0]["optim/grad_norm"] > 0
    assert offloaded == plain
