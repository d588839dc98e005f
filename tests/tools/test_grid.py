"""A grid file: the runs that it names, and what is wrong with it, all at once and by name."""

from pathlib import Path

import grid as grids
import pytest
import yaml

from megatron_rl.config import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "recipes" / "evidence.yaml"
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


def test_other_seeds_and_another_group(tmp_path):
    grid = grids.read(written(tmp_path, sizes=None), group="mine", seeds=[7])
    assert {one.name.partition("_")[0] for one in grid.experiments()} == {"mine"}
    assert {one.seed for one in grid.experiments()} == {7}
    # of every size: the file's choice of seeds is of its own
    grid = grids.read(written(tmp_path), seeds=[7, 8])
    assert [one.name for one in grid.experiments("subset")][::2] == [
        "small_fine_none_s7",
        "small_fine_none_s8",
    ]
    grid = grids.read(written(tmp_path, sizes={"subset": {"correction": "none"}}, leave_out=[]))
    assert {one.labels[1] for one in grid.experiments("subset")} == {"none"}


def test_corrections_of_a_recipe_are_a_grid_of_one_axis():
    names = [
        one.name
        for one in grids.of_corrections(Path("r.yaml"), "g", ["none", "tis"], [1, 2]).experiments()
    ]
    # after every round each was seen equally often
    assert names == [
        "g_none_s1",
        "g_tis_s1",
        "g_none_s2",
        "g_tis_s2",
    ]
    assert [
        one.name for one in grids.of_corrections(Path("r.yaml"), "g", ["none"], []).experiments()
    ] == ["g_none"]


@pytest.mark.fault(
    "a grid file is mistyped", "every mistake is named by its key, and no run is started"
)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"axis": {}}, "axis: unknown key; did you mean axes?"),
        ({"axes": {}}, "axes: expected"),
        ({"axes": {"a": {"x": "b.c=1"}}}, "axes: expected"),
        ({"axes": {"a": {"x/y": []}}}, "axes.a: the label 'x/y'"),
        ({"axes": {"a": {1: []}}}, "axes.a: the label 1"),
        ({"axes": {"a": {"x": ["b.c"]}}}, "axes.a.x: 'b.c'"),
        ({"axes": {"a": {"x": ["run.seed=3"]}}}, "axes.a.x: run.seed=3"),
        ({"base": "nowhere.yaml"}, "base: 'nowhere.yaml'"),
        ({"seeds": [1, 1]}, "seeds: [1, 1]"),
        ({"seeds": [1.5]}, "seeds: [1.5], expected"),
        ({"task": "chess"}, "task: 'chess'"),
        ({"outliers": {"factor": 4, "channels": 1}}, "outliers: "),
        ({"reference": {"sampler": "fine"}}, "reference: {'sampler': 'fine'}"),
        (
            {"reference": {"sampler": "fine", "correction": "tiss"}},
            "reference: 'tiss' is no label of correction",
        ),
        ({"leave_out": [{"samplers": "fine"}]}, "leave_out: 'samplers' is no axis"),
        ({"leave_out": ["fine"]}, "leave_out: 'fine'"),
        ({"leave_out": [{"correction": 5}]}, "leave_out: 5 is no label of correction"),
        ({"sizes": {"subset": {"seeds": [9]}}}, "leave no cell"),
        ({"sizes": {"tiny": {}}}, "sizes.tiny: no size"),
    ],
)
def test_a_mistake_is_named(tmp_path, changes, said):
    with pytest.raises(ConfigError) as caught:
        grids.read(written(tmp_path, **changes))
    assert said in str(caught.value)


def test_all_mistakes_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        grids.read(written(tmp_path, seeds=[1.5], base="nowhere.yaml", task="chess"))
    assert len(str(caught.value).splitlines()) == 3


def test_what_is_a_grid(tmp_path):
    assert grids.is_grid(SHIPPED)
    assert not grids.is_grid(ROOT / "recipes" / "quickstart.yaml")
    assert not grids.is_grid(tmp_path / "nowhere.yaml")
    (tmp_path / "torn.yaml").write_text("a: [")
    assert not grids.is_grid(tmp_path / "torn.yaml")


def test_the_shipped_grid_is_what_its_page_says():
    grid = grids.read(SHIPPED)
    count = {size: len(grid.experiments(size)) for size in grids.SIZES}
    page = (ROOT / "docs" / "evidence.md").read_text()
    assert all(f"| {runs} |" in page for runs in count.values()), count
    assert count["default"] == 27
