"""Transformer Engine's layers under the learner, of every family, on one rank and on two that share
a sequence.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mocked_gpu
import pytest

HERE = Path(__file__).parent
FAMILIES = ("qwen3", "qwen2", "qwen3_moe")


@pytest.fixture(
    scope="module",
    params=[1, 2],
    ids=["tp1", "tp2_sp"],
)
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Return the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    count = request.param
    helpers = (HERE.parents[1], HERE, HERE.parent / "learner", HERE.parent)
    environment = {**mocked_gpu.environment(*helpers), "GLOO_SOCKET_IFNAME": "lo"}
    processes = []
    for rank in range(count):
        command = [
            sys.executable,
            str(HERE / "layer_rank.py"),
            str(rank),
            str(count),
            str(folder / "store"),
        ]
        with (folder / f"{rank}.log").open("w") as log, (folder / f"{rank}.json").open("w") as out:
            processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=log))
    codes = [process.wait(500) for process in processes]
    assert codes == [0] * count, (folder / "0.log").read_text()[-4000:]
    return [
        json.loads((folder / f"{rank}.json").read_text().splitlines()[-1]) for rank in range(count)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_in_the_table_and_marked(family: str, ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        about = found[family]
        assert about["problems"] == []
        assert (about["missing"], about["extra"]) == ([], [])
        assert "TELayerNormColumnParallelLinear" in about["kinds"]
        assert "TEDotProductAttention" in about["kinds"]
        assert ("TEGroupedMLP" in about["kinds"]) == (family in mocked_gpu.EXPERTS)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_learner_is_made_and_its_weights_can_be_sent(
    family: str, ranks: list[dict[str, Any]]
) -> None:
    assert all(found[family]["failure"] is None for found in ranks)
    assert ranks[0][family]["tensors"] > 10
    assert all(found[family]["tensors"] == 0 for found in ranks[1:]), (
        "the first rank of the group sends"
    )
    assert all(found[family]["optimizer"] == ["FusedAdam"] for found in ranks)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_compute_as_an_engine_of_their_format(
    family: str, ranks: list[dict[str, Any]]
) -> None:
    """INT8 and FP8, engines of one, two and four ranks: to the rounding of the outputs to BF16."""
    for found in ranks:
        for errors in found[family]["imitated"]:
            assert len(errors["imitated"]) >= 4
            assert max(errors["imitated"]) < 0.004
            assert min(errors["plain"]) > 0.006


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("None", "Float8Block"),
        ("blockwise", "Float8Block"),
        ("tensorwise", "Float8Current"),
        ("mxfp8", "MXFP8Block"),
    ],
)
def test_fp8_takes_the_packs(recipe: str, kind: str, ranks: list[dict[str, Any]]) -> None:
    """The rank itself has asked Transformer Engine's own check."""
    for found in ranks:
        assert found[f"fp8 {recipe}"]["recipe"] == f"{kind}Scaling"
        assert found[f"fp8 {recipe}"]["packs"] == ranks[0][f"fp8 {recipe}"]["packs"]
