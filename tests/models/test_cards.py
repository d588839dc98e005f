"""The cards of conf/model: what they say of a model's sizes adds up to what its authors publish."""

import json

import pytest

from megatron_rl.config.plain_yaml import CONF
from megatron_rl.models.mapping import parameters
from megatron_rl.models.shape import ModelShape

# billions of parameters, as each model's own page gives them
PUBLISHED = {
    "Qwen3-0.6B": 0.596,
    "Qwen3-1.7B": 1.72,
    "Qwen3-8B": 8.19,
    "Qwen3-32B": 32.76,
    "Qwen3-30B-A3B": 30.53,
    "Qwen3-235B-A22B": 235.09,
    "Qwen2.5-7B": 7.62,
    "Qwen2.5-32B": 32.76,
    "Llama-3.1-8B-Instruct": 8.03,
    "Llama-3.1-70B-Instruct": 70.55,
    "Mixtral-8x7B-Instruct-v0.1": 46.70,
}


def test_every_card_is_of_a_model_whose_size_is_published():
    assert {path.stem for path in (CONF / "model").glob("*.json")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_card_has_as_many_parameters_as_its_model(name):
    shape = ModelShape.from_hf(json.loads((CONF / "model" / f"{name}.json").read_text()))
    assert parameters(shape) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.002)
