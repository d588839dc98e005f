"""Recipes: every shipped one loads, mistakes are named, presets and overrides do what they say."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megatron_rl.config import ConfigError, all_keys, from_mapping, load, to_yaml
from megatron_rl.schema import Format, Level, OnNonFinite

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("learner: {tensor_parallel: 2, on_nonfinite: raise}\ncorrection: tis\n")
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_survives_a_round_trip(path: Path) -> None:
    config = load(path)
    assert config.run.name == path.stem
    assert from_mapping(OmegaConf.to_container(OmegaConf.create(to_yaml(config)))) == config


@pytest.mark.parametrize("preset", sorted((ROOT / "conf" / "correction").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_correction_preset_loads(recipe: Path, preset: Path) -> None:
    load(recipe, [f"correction={preset.stem}"])


def test_overrides_are_typed_and_win(recipe: Path) -> None:
    config = load(recipe, ["optim.lr=1e-4", "quantization.format=fp8", "learner.on_nonfinite=skip", "run.name=other"])
    assert config.optim.lr == 1e-4
    assert config.quantization.format is Format.fp8
    assert config.learner.on_nonfinite is OnNonFinite.skip
    assert config.run.name == "other"
    assert config.learner.tensor_parallel == 2


def test_a_preset_starts_its_section_afresh_and_keys_go_on_top(recipe: Path) -> None:
    recipe.write_text("correction: {weight: {low: 0.5}}\n")
    assert load(recipe).correction.weight.low == 0.5
    assert load(recipe, ["correction=tis"]).correction.weight.low is None
    changed = load(recipe, ["correction=tis", "correction.weight.high=3"])
    assert changed.correction.weight.high == 3.0
    recipe.write_text("correction: {preset: seq_tis, weight: {high: 4}}\n")
    both = load(recipe).correction.weight
    assert (both.level, both.high) == (Level.sequence, 4.0)


def test_bases_merge_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("optim: {lr: 1.0e-3, warmup_steps: 3}\n")
    (tmp_path / "b.yaml").write_text("optim: {lr: 2.0e-3}\n")
    (tmp_path / "c.yaml").write_text("base: [a.yaml, b.yaml]\nrun: {steps: 7}\n")
    config = load(tmp_path / "c.yaml")
    assert (config.optim.lr, config.optim.warmup_steps, config.run.steps) == (2e-3, 3, 7)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.tensor_paralel=2", ["learner.tensor_paralel", "learner.tensor_parallel"]),
        ("lerner.tensor_parallel=2", ["lerner", "learner"]),
        ("tensor_parallel=2", ["learner.tensor_parallel"]),
        ("correction.weight.hgh=3", ["correction.weight.hgh", "correction.weight.high"]),
        ("quantization.format=int9", ["quantization.format", "int9", "int8"]),
        ("optim.lr=fast", ["optim.lr", "fast"]),
        ("correction=tsi", ["correction", "tsi", "tis"]),
        ("learner=5", ["learner", "5", "tensor_parallel"]),
        ("steps", ["steps", "section.key=value"]),
        ("correction.reject=[{stta: ratio}]", ["correction.reject[0].stta", "stat"]),
        ("correction.weight.high=-1", ["correction.weight.high", "-1"]),
        ("correction.weight={low: 3, high: 2}", ["correction.weight"]),
        ("correction.reject=[{stat: k2}]", ["correction.reject[0]"]),
        ("correction={anchor: sampler, weight: {level: token}}", ["correction"]),
        ("correction.reject=[{stat: kk}]", ["correction.reject[0].stat", "kk"]),
    ],
)
def test_mistakes_name_the_key_and_the_way_out(recipe: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(recipe, [override])
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_recipe_suggests_its_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"quickstart\.yaml"):
        load(ROOT / "recipes" / "quikstart.yaml")


def test_a_base_that_leads_back_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="leads back"):
        load(tmp_path / "a.yaml")


def test_broken_yaml_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("optim: {lr: [\n")
    with pytest.raises(ConfigError, match=r"a\.yaml"):
        load(tmp_path / "a.yaml")


def test_the_number_of_keys_stays_graspable() -> None:
    assert len(all_keys()) < 130
