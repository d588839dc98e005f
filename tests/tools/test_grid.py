"""A grid file: its runs, and its mistakes by key."""

from pathlib import Path

import grid as grids
import pytest
import yaml

from megatron_rl.config import ConfigError

SMALL = {
    "base": "base.yaml",
    "seeds": [1, 2],
    "axes": {
        "sampler": {"fine": ["a.b=1"], "coarse": ["a.b=2"]},
        "correction": {"none": [], "tis": ["c.d=3", "e.f=4"]},
    },
    "leave_out": [{"sampler": "fine", "correction": ["tis"]}],
    "reference": {"sampler": "fine", "correction": "none"},
    "sizes": {"subset": {"seeds": [2], "correction": ["none"]}},
}


def written(folder: Path, **changes: object) -> Path:
    (folder / "base.yaml").write_text("run: {steps: 2}\n")
    path = folder / "small.yaml"
    path.write_text(
        yaml.safe_dump(
            {key: value for key, value in (SMALL | changes).items() if value is not None},
            sort_keys=False,
        )
    )
    return path


def test_every_cell_with_every_seed(tmp_path):
    grid = grids.read(written(tmp_path))
    names = [one.name for one in grid.experiments()]
    assert names == [
        f"small_{cell}_s{seed}"
        for seed in (1, 2)
        for cell in ("fine_none", "coarse_none", "coarse_tis")
    ]
    last = grid.experiments()[-1]
    assert (last.labels, last.seed) == (("coarse", "tis"), 2)
    assert last.overrides == ("a.b=2", "c.d=3", "e.f=4", "run.seed=2")
    assert [one.name for one in grid.experiments("subset")] == [
        "small_fine_none_s2",
        "small_coarse_none_s2",
    ]
    assert grid.experiments("full") == grid.experiments()
    assert grid.reference == ("fine", "none")


def test_corrections_of_a_recipe_are_a_grid_of_one_axis():
    def names(corrections, seeds):
        grid = grids.of_corrections(Path("r.yaml"), "g", corrections, seeds)
        return [one.name for one in grid.experiments()]

    # a round of all corrections for each seed
    rounds = ["g_none_s1", "g_tis_s1", "g_none_s2", "g_tis_s2"]
    assert names(["none", "tis"], [1, 2]) == rounds
    assert names(["none"], []) == ["g_none"]


@pytest.mark.fault(
    "a grid file is mistyped", "every mistake is named by its key, and no run is started"
)
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"axis": {}}, "axis: unknown key"),
        ({"axes": {}}, "axes: "),
        ({"axes": {"a": {"x/y": []}}}, "axes.a: "),
        ({"axes": {"a": {"x": ["b.c"]}}}, "axes.a.x: 'b.c'"),
        ({"axes": {"a": {"x": ["run.seed=3"]}}}, "axes.a.x: run.seed=3"),
        ({"base": "nowhere.yaml"}, "base: 'nowhere.yaml'"),
        ({"seeds": [1, 1]}, "seeds: [1, 1]"),
        ({"task": "chess"}, "task: 'chess'"),
        ({"bf16_samples": "4"}, "bf16_samples: '4'"),
        ({"outliers": {"factor": 4, "channels": 1}}, "outliers: "),
        ({"reference": {"sampler": "fine"}}, "reference: {'sampler': 'fine'}"),
        ({"leave_out": [{"samplers": "fine"}]}, "leave_out: 'samplers'"),
        ({"sizes": {"tiny": {}}}, "sizes.tiny: "),
        ({"sizes": {"subset": {"seeds": [9]}}}, "leave no cell"),
    ],
)
def test_a_mistake_is_named(tmp_path, changes, key):
    with pytest.raises(ConfigError) as caught:
        grids.read(written(tmp_path, **changes))
    assert key in str(caught.value)
