"""What attention costs beside the matrices."""

from __future__ import annotations

import pytest

from megatron_rl.learner.modules.costs import attention_share, operations
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model, read_hf_config

# at so many tokens attention costs as much as all matrices do, counted by hand from config.json: hidden, heads, layers
AS_LONG = {
    "Qwen3-8B": (36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288) + 4096 * 151936) / (36 * 4096),
    "Qwen3-30B-A3B": (48 * (2048 * (2 * 4096 + 2 * 512 + 128) + 8 * 3 * 2048 * 768) + 2048 * 151936) / (48 * 4096),
}


@pytest.mark.parametrize("name", AS_LONG)
def test_where_attention_is_half_of_the_work(name: str) -> None:
    model = Model.of(read_hf_config(f"conf/model/{name}.json"), Layout())
    assert 1 / attention_share(model) == pytest.approx(AS_LONG[name])
    each = operations(model, AS_LONG[name])
    assert each.attention == pytest.approx(each.dense + each.experts + each.head)
