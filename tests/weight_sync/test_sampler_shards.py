"""A sampler of two tensor-parallel ranks: each reads its share of what the learner wrote, and
vLLM's own loaders cut the right shards out of that alone.

Two processes hold vLLM's layers, without an engine around them. 128x128 blocks need a kernel that
not every host has; vLLM's quantized layers of experts need one that no host has.
"""

from __future__ import annotations

from typing import Any

import pytest
from spawned import run_ranks

CASES = [
    # a mixture first: vLLM makes the groups of experts for such models only, and groups are made
    # once
    {"family": "qwen3_moe", "format": "none", "tied": False},
    {"family": "llama", "format": "none", "tied": False},
    {"family": "llama", "format": "fp8", "tied": True},
    {"family": "qwen2", "format": "int8", "tied": False},
    {"family": "qwen2", "format": "none", "tied": True},
    {"family": "qwen3", "format": "int8", "tied": True},
    {"family": "qwen3", "format": "fp8", "tied": False},
    {"family": "qwen3", "format": "fp8_block", "tied": False},
    {"family": "mixtral", "format": "none", "tied": True},
    {"family": "ernie4_5", "format": "int8", "tied": True},
    {"family": "phi3", "format": "int8", "tied": False},
    # both ranks have a copy
    {"family": "qwen2", "format": "int8", "tied": False, "num_key_value_heads": 1},
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    codes, ranks = run_ranks("loader_rank", tmp_path_factory.mktemp("shards"), CASES, kind="vllm")
    assert codes == [0, 0]
    return ranks


@pytest.mark.engine
@pytest.mark.parametrize(
    "number", range(len(CASES)), ids=lambda n: "-".join(map(str, CASES[n].values()))
)
def test_every_rank_holds_its_share(number: int, found: list[list[dict[str, Any]]]) -> None:
    if "skip" in found[0][number]:
        pytest.skip(found[0][number]["skip"].splitlines()[-1])
    for of_rank in found:
        assert of_rank[number]["wrong"] == []
        # four linear layers and two norms; embedding and last norm
        assert of_rank[number]["compared"] >= 2 * 6 + 2
        # norms, routers, scales of rows are for all
        assert of_rank[number]["read"] <= 0.57 * of_rank[number]["of"]
