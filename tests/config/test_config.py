"""Recipes: every shipped one loads, mistakes are named, presets and overrides do what they say."""

import logging
import re
from pathlib import Path

import pytest
from grid import is_grid
from helpers import Command, refusal

from megatron_rl.config import ConfigError, all_keys, from_mapping, load, to_yaml, unknown
from megatron_rl.config.load import read
from megatron_rl.config.plain_yaml import CONF, read_yaml
from megatron_rl.config.schema import Format, Level, OnNonFinite
from megatron_rl.config.shape import key_of

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if not is_grid(path))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("learner: {tensor_parallel: 2, on_nonfinite: raise}\ncorrection: tis\n")
    return path


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_survives_a_round_trip(path: Path) -> None:
    config = load(path)
    assert config.run.name == path.stem
    assert from_mapping(read_yaml(to_yaml(config))) == config


@pytest.mark.parametrize(
    "preset", sorted((ROOT / "conf" / "correction").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_correction_preset_loads(recipe: Path, preset: Path) -> None:
    load(recipe, [f"correction={preset.stem}", "rollout.top_logprobs.max=32"])


def test_overrides_are_typed_and_win(recipe: Path) -> None:
    overrides = [
        "optim.lr=1e-4",
        "optim.min_lr=0",
        "quantization.format=fp8",
        "learner.on_nonfinite=skip",
        "run.name=2024_05",
    ]
    config = load(recipe, overrides)
    assert config.optim.lr == 1e-4
    assert type(config.optim.min_lr) is float
    assert config.quantization.format is Format.fp8
    assert config.learner.on_nonfinite is OnNonFinite.skip
    assert config.run.name == "2024_05"
    assert config.learner.tensor_parallel == 2
    assert "on_nonfinite: raise\n" in to_yaml(load(recipe))  # not the member's name, raise_


def test_another_metric_stops_in_place_of_the_base_s(recipe: Path) -> None:
    recipe.write_text("run: {stop: {eval/accuracy: 0.28}}\n")
    assert load(recipe, ["run.stop.eval/accuracy=0.5"]).run.stop == {"eval/accuracy": 0.5}
    assert "run.stop=null" in refusal(load, recipe, ["run.stop.eval/reward=1"])
    other = load(recipe, ["run.stop=null", "run.stop.eval/reward=1"])
    assert other.run.stop == {"eval/reward": 1.0}


def test_a_preset_starts_its_section_afresh_and_keys_go_on_top(recipe: Path) -> None:
    recipe.write_text("correction: {weight: {low: 0.5}}\n")
    assert load(recipe).correction.weight.low == 0.5
    assert load(recipe, ["correction=tis"]).correction.weight.low is None
    changed = load(recipe, ["correction=tis", "correction.weight.high=3"])
    assert changed.correction.weight.high == 3.0
    recipe.write_text("correction: {preset: seq_tis, weight: {high: 4}}\n")
    both = load(recipe).correction.weight
    assert (both.level, both.high) == (Level.sequence, 4.0)


def test_recipes_of_the_working_folder_come_before_those_of_the_package(empty: Path) -> None:
    assert load("dapo-qwen2.5_7b-1n8g-int8").run.name == "dapo-qwen2.5_7b-1n8g-int8"
    assert load("recipes/tools.yaml").run.steps == 40
    for name in ("tools", "other"):  # a folder is no recipe
        (empty / name).mkdir()
    (empty / "other" / "recipe.yaml").write_text("base: ../conf/tools.yaml\n")
    assert load("other/recipe.yaml").run.steps == load(CONF / "tools.yaml").run.steps
    for folder, steps in (("conf", 5), ("recipes", 6)):
        (empty / folder).mkdir()
        (empty / folder / "tools.yaml").write_text(f"run: {{steps: {steps}}}\n")
    assert load("other/recipe.yaml").run.steps == 5
    assert load("tools").run.steps == load("recipes/tools.yaml").run.steps == 6
    with pytest.raises(ConfigError, match=r"other/tools.yaml: no such file"):
        load("other/tools.yaml")


def test_bases_merge_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("optim: {lr: 1.0e-3, warmup_steps: &n 3}\nrun: {seed: *n}\n")
    (tmp_path / "b.yaml").write_text("optim: {lr: 2.0e-3}\n")
    (tmp_path / "c.yaml").write_text("base: [a.yaml, b.yaml]\nrun: {steps: 7}\n")
    config = load(tmp_path / "c.yaml")
    assert (config.optim.lr, config.optim.warmup_steps) == (2e-3, 3)
    assert (config.run.steps, config.run.seed) == (7, 3)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.tensor_paralel=2", ["learner.tensor_paralel", "learner.tensor_parallel"]),
        ("lerner.tensor_parallel=2", ["lerner", "learner"]),
        ("tensor_parallel=2", ["learner.tensor_parallel"]),
        ("rollout.dynamic_samplig=true", ["rollout.dynamic_sampling"]),
        ("quantization.format=int9", ["quantization.format", "int9", "int8"]),
        ("advantage.estimator=gropo", ["advantage.estimator", "gropo", "mean grpo"]),
        ("optim.lr=fast", ["optim.lr", "fast"]),
        ("correction=tsi", ["correction", "tsi", "tis"]),
        ("learner=5", ["learner", "5", "tensor_parallel"]),
        ("steps", ["steps", "section.key=value"]),
        ("correction.weight={low: 3, high: 2}", ["correction.weight"]),
        ("correction.reject=[{stta: ratio}]", ["correction.reject[0].stta", "stat"]),
        ("correction={anchor: sampler, weight: {level: token}}", ["correction"]),
        ("correction.weight.high=", ["null"]),  # an unset variable of a shell
    ],
)
def test_mistakes_name_the_key_and_the_way_out(
    recipe: Path, override: str, words: list[str]
) -> None:
    said = refusal(load, recipe, [override])
    assert all(word in said for word in words), said


@pytest.mark.parametrize("value", ["{a: 1}", "{}", "[1, 2]", "[{a: 1}]", "{a: [{b: 1}]}"])
def test_a_mapping_for_a_list_or_a_list_for_a_mapping_names_the_key(
    tmp_path: Path, value: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{}")
    given = refusal(load, path, [f"{key}={value}" for key in all_keys()])
    named = {key_of(line) for line in given.splitlines()}
    assert len(named) > 90
    complaints = {}
    for key in set(all_keys()) - named:
        try:
            load(path, [f"{key}={value}"])
        except ConfigError as error:
            complaints[key] = str(error)
    assert all(key in said for key, said in complaints.items())


BAD_VALUES = [
    *(
        ("correction.weight.high", value)
        for value in ("-1", "0", "true", "'null'", ".inf", ".nan", "[0.5, 5]", "0.5_5", "'0.5_5'")
    ),
    ("correction.reject", "5"),
    ("correction.reject", "[null]"),
    ("correction.reject[0].high", "[{level: token, stat: k2, high: 0.1_2}]"),
    ("correction.reject[0].level is missing", "[{stat: k2, high: 0.1}]"),
    ("correction.reject[0].level", "[{level: none, stat: k2, high: 0.1}]"),
    ("loss.clip_low", ".nan"),
    ("loss.reduction", "mean"),
    ("optim.lr", "0"),
    ("run.seed", "-1"),
    ("run.seed", "1.0"),
    ("run.name", "1.10"),
    ("run.name", "no"),
    ("run.name", "${oc.env:HOME}"),
    ("sampler.vllm", "{a: [{b: '${oc.env:WANDB_API_KEY}'}]}"),
    ("run.stop", "{eval/accuracy: high}"),
    ("run.stop", "{eval/accuracy: .nan}"),
    ("run.stop", "{eval/accuracy: 0.3, eval/reward: 1}"),
    ("run.stop", "{}"),
    ("run.stop", "eval/accuracy"),
    ("rollout.temperature", "0"),
    ("rollout.top_p", "0"),
    ("rollout.samples_per_prompt", "two"),
    ("reward.name", "{math_dapo: much}"),
    ("reward.overlong_buffer", "-1"),
    ("reward.overlong_buffer", "4.5"),
    ("reward.overlong_buffer", "513"),
    ("data.train", "{rows.jsonl: 0}"),
    ("eval.sets", "{'a b': {samples: 2}}"),
    ("eval.sets.aime.samples", "{aime: {samples: 0}}"),
    ("sync.probe_budget", "-1"),
    ("log.profile_steps", "[0]"),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_alone_and_by_its_key(recipe: Path, key: str, value: str) -> None:
    given = re.sub(r"\[.*|(?<=eval\.sets)\..*", "", key)
    (found,) = refusal(load, recipe, [f"{given}={value}"]).splitlines()
    assert found.startswith(key)


AS_SAMPLER = ["learner.forward=as_sampler", "quantization=int8"]
ADAPTERS = ["quantization=int8", "learner.lora.rank=8"]
AHEAD = ["rollout.max_staleness=1"]
FRESH_ONLY = "correction.reject=[{level: token, stat: staleness, high: 0}]"
TOGETHER = [
    (AS_SAMPLER, "quantization.format=fp8_block", "learner.forward"),
    (AS_SAMPLER, "sampler.tensor_parallel=3", "learner.forward"),
    (AS_SAMPLER, "run.device=cuda", "learner.forward"),
    (ADAPTERS, "learner.forward=as_sampler", "learner.forward"),
    (ADAPTERS, "learner.lora.targets=[]", "learner.lora.targets"),
    (ADAPTERS, "learner.lora.alpha=0", "learner.lora.alpha"),
    (["learner.lora.alpha=4"], "learner.lora.rank=0", "learner.lora.alpha"),
    (["learner.router=replay"], "rollout.source=dataset", "learner.router"),
    (["rollout.top_logprobs.max=8"], "rollout.source=dataset", "rollout.top_logprobs.max"),
    (["learner.router=replay"], "learner.megatron.moe_aux_loss_coeff=0.01", "learner.router"),
    (["learner.router=replay"], "learner.megatron.moe_router_fusion=true", "learner.router"),
    (AHEAD, "correction=bypass", ""),
    (AHEAD, "correction=none", "rollout.max_staleness"),
    ([*AHEAD, "correction=none"], FRESH_ONLY, "rollout.max_staleness"),
    ([*AHEAD, "eval.every=9"], "sync.every=3", "sync.every"),
    (AHEAD, "sampler.sleep=offload", "sampler.sleep"),
    ([*AHEAD, "sync.transport=nccl"], "rollout.in_flight=interrupt", "rollout.in_flight"),
    (AHEAD, "rollout.max_staleness=65", "rollout.max_staleness"),
    (AHEAD, FRESH_ONLY, "correction.reject[0].high"),
    ([*AHEAD, "rollout.in_flight=interrupt"], FRESH_ONLY, ""),
]


@pytest.mark.parametrize(("given", "more", "key"), TOGETHER)
def test_keys_that_do_not_go_together(recipe: Path, given: list[str], more: str, key: str) -> None:
    """`key`: the one that is refused; none where they do."""
    if not key:
        load(recipe, [*given, more])
        return
    assert any(line.startswith(key) for line in refusal(load, recipe, [*given, more]).splitlines())


@pytest.mark.parametrize("name", ["tsi", "TIS", "tis.yaml", "../base", "''", "5", "null", "[tis]"])
def test_what_is_no_preset_is_refused_with_the_list(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"correction: {name}\n")
    said = refusal(load, path)
    assert said.startswith("correction is ") and "adaptive, bypass, " in said
    assert ("mean tis?" in said) == (name in ("tsi", "TIS", "tis.yaml"))


def test_everything_wrong_is_said_at_once_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "correction: {anchor: samplr, weight: {high: two, hihg: 3}, reject: [{high: 3}]}\n"
        "loss: {name: gspo, clip_low: -1, level: turn}\n"
        "advantage: {estimator: rloo}\nrollout: {samples_per_prompt: 1}\n"
    )
    said = [line.split(" is ")[0].split(":")[0] for line in refusal(load, path).splitlines()]
    correction = ("anchor", "weight.high", "weight.hihg", "reject[0].level", "reject[0].stat")
    assert said == [
        *(f"correction.{key}" for key in correction),
        "loss.clip_low",
        "loss.level",
        "rollout.samples_per_prompt",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: 5\n", "base is 5"),
        ("base: [5]\n", r"base is \[5\]"),
        ("base: bad.yaml\n", "`base` leads back"),
        ("- run\n", "expected keys such as"),
        ("run: {steps: 1}\nrun: {steps: 2}\n", "run is given twice.* line 2"),
        ("run: !!int x\n", "not readable as YAML"),
        ("optim: {lr: [\n", r"bad\.yaml"),
        ("a: " + "[" * 5000, r"bad\.yaml"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load(path)


def test_files_that_are_not_there(tmp_path: Path, command: Command) -> None:
    (tmp_path / "toy_sft.yaml").write_text("run: {steps: 1}\n")
    (tmp_path / "quickstart.yaml").write_text("base: toy_stf.yaml\n")
    for name, words in (
        ("quikstart.yaml", [f"{tmp_path}/quickstart.yaml?"]),
        ("quickstart.yaml", [f"base names {tmp_path}/toy_stf.yaml", f"{tmp_path}/toy_sft.yaml?"]),
    ):
        said = command.refused(recipe=tmp_path / name)
        assert said.startswith(f"error: {tmp_path / name}: ")
        assert all(word in said for word in words)


@pytest.mark.parametrize(
    "text",
    [
        "correction: {preset: tis, weight: {high: 5., low: .5, normalize: yes}}",
        "correction: {preset: seq_tis, weight: {target_ess: 1, high: null, low: 1E-4}}",
        "correction: {preset: icepop, non_finite: raise, reject: [{level: token, stat: k1, high: 0}]}",
        "correction: {reject: [{level: sequence, stat: m2, reduce: mean, budget: 1e-3}]}",
        "loss: {name: cispo, params: {absolute: true}, clip_high: 5}",
        "loss: {name: ppo, clip_low: 0, clip_high: 0, params: {dual_clip: 3}}",
        "loss: {name: dppo, params: {trust_region: binary_kl}}",
        "loss: {name: vespo, params: {gamma_positive: [1, 2]}}\ncorrection: bypass",
        "reward: {overlong_buffer: 512, overlong_filter: true, name: {math_dapo: 1, 'm.py:f': 0.1}}",
        "run: {name: 2024_05, stop: {eval/accuracy: 1}}",
        "eval: {sets: {aime: {path: math, samples: 4, temperature: 1}}}",
    ],
)
def test_good_values_load_and_survive_a_round_trip(tmp_path: Path, text: str) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(f"{text}\n")
    config = load(path)
    assert from_mapping(read_yaml(to_yaml(config))) == config


def test_a_reference_to_another_key_is_resolved(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text('run: {root: there}\nsync: {dir: "${run.root}/${rollout.top_p}"}\n')
    given = [
        "data.train=a",
        "model.path=b",
        "rollout.max_response_tokens=${rollout.max_prompt_tokens}",
    ]
    config = load(path, [*given, "eval.max_prompts=${.every}"])
    assert config.eval.max_prompts == config.eval.every
    assert config.sync.dir == "there/1.0"
    assert config.rollout.max_response_tokens == config.rollout.max_prompt_tokens
    with pytest.raises(ConfigError, match=r"sync\.dir.*nothing\.here"):
        load(path, [*given, "sync.dir=${nothing.here}"])
    held = load(
        path, [*given, "data.train={a.jsonl: '${optim.lr}'}", "log.profile_steps=['${sync.every}']"]
    )
    assert (held.data.train, held.log.profile_steps) == ({"a.jsonl": 1e-6}, [1])


def test_a_reference_reaches_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "8765")
    path = tmp_path / "mine.yaml"
    path.write_text("run: {root: '${oc.env:MY_SECRET}'}\nsync: {dir: '${run.root}'}\n")
    config, said = read(path)
    assert any(one.startswith("run.root is ${oc.env:MY_SECRET}") for one in said)
    assert "8765" not in f"{config}{said}"


@pytest.mark.parametrize("where", ["file", "command line"])
def test_a_deprecated_key_is_accepted_with_a_warning(tmp_path, monkeypatch, caplog, where):
    monkeypatch.setitem(unknown.DEPRECATED, "rollout.lag", "rollout.max_staleness")
    monkeypatch.setattr(logging.getLogger("megatron_rl"), "propagate", True)
    recipe = tmp_path / "old.yaml"
    recipe.write_text(f"base: {ROOT / 'recipes' / 'quickstart.yaml'}\n")
    overrides = ["rollout.lag=2"]
    if where == "file":
        recipe.write_text(recipe.read_text() + "rollout: {lag: 2}\n")
        overrides = []
    config, found = read(recipe, overrides)
    assert not found and config.rollout.max_staleness == 2
    assert "rollout.lag is now rollout.max_staleness" in caplog.text
    _, found = read(recipe, [*overrides, "rollout.lagg=2"])
    assert any(line.startswith("rollout.lagg: unknown key") for line in found)
