"""Removed keys: an error with a hint in a recipe, ignored in a recorded run."""

from pathlib import Path

import pytest
from helpers import refusal

from megatron_rl.checkpoint.resume import refuse_changes
from megatron_rl.config import ConfigError, all_keys, load, recorded_config, to_yaml
from megatron_rl.config.plain_yaml import read_yaml, write_yaml
from megatron_rl.config.schema import Config
from megatron_rl.config.unknown import ANY, REMOVED, carried


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text("{}\n")
    return tmp_path


def recorded(folder: Path, **sections: dict[str, object]) -> Path:
    """A run's configuration as another version has written it."""
    mapping = read_yaml(to_yaml(Config()))
    for section, keys in sections.items():
        mapping[section] |= keys
    (folder / "config.yaml").write_text(write_yaml(mapping))
    return folder / "config.yaml"


def test_a_recipe_with_a_removed_key_gets_a_hint(folder: Path) -> None:
    assert not REMOVED.keys() & set(all_keys())
    for key, removed in REMOVED.items():
        said = refusal(load, folder / "mine.yaml", [f"{key}=1"])
        assert said == f"{key}: unknown key; {removed.hint}"


@pytest.mark.parametrize("key", [key for key, one in REMOVED.items() if one.default is not ANY])
def test_a_run_resumes_without_a_removed_key_only_at_its_default(key: str) -> None:
    section, _, name = key.rpartition(".")
    mapping: dict = {}
    inner = mapping
    for one in section.split("."):
        inner = inner.setdefault(one, {})
    inner[name] = REMOVED[key].default
    assert carried(mapping) == {}
    inner[name] = "other"
    with pytest.raises(ValueError, match=rf"^{key} is other: "):
        carried(mapping)


def test_a_key_that_moved_is_carried_over(folder: Path) -> None:
    old = {"dual_clip": 3.0, "tau_positive": 1.0, "clip_growth": 0.0}
    removed = {"loss": {**old, "params": {}}, "sync": {"probe_layers": False}}
    path = recorded(folder, run={"name": "mine"}, **removed)
    assert recorded_config(path).loss.params == {"dual_clip": 3.0}
    refuse_changes(path, to_yaml(load(folder / "mine.yaml", ["loss.params.dual_clip=3"])))
    with pytest.raises(ConfigError, match=r"loss\.params\.dual_clip: 3\.0 -> None"):
        refuse_changes(path, to_yaml(load(folder / "mine.yaml")))


def test_a_key_that_was_set_is_refused_by_name(folder: Path) -> None:
    path = recorded(folder, correction={"step_power": 0.5}, loss={"prefix_budget": 0.02})
    said = refusal(recorded_config, path)
    assert "correction.step_power is 0.5" in said and "loss.prefix_budget is 0.02" in said


def test_engines_of_a_fleet_are_carried_over(folder: Path) -> None:
    fleet = {"replicas": 2, "servers": 0, "addresses": [], "formats": ["none", "int8"]}
    sampler = recorded_config(recorded(folder, sampler={"fleet": fleet})).sampler
    assert (sampler.engines, sampler.dedicated_nodes) == (2, False)
    assert sampler.formats == ["none", "int8"]


def test_one_interval_and_one_list_of_variables(folder: Path) -> None:
    old = {"every": 0, "minutes": 30.0, "keep_every": 0}
    path = recorded(
        folder,
        checkpoint=old,
        reward={"environment": ["JUDGE"]},
        environment={"variables": ["SEARCH"]},
    )
    config = recorded_config(path)
    assert config.checkpoint.every == "30min"
    assert config.run.variables == ["JUDGE", "SEARCH"]
    assert recorded_config(recorded(folder, checkpoint=old | {"every": 5})).checkpoint.every == 5
