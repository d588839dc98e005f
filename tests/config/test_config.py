"""Recipes: every shipped one loads, mistakes are named, presets and overrides do what they say."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from grid import is_grid
from helpers import refusal
from omegaconf import OmegaConf

from megatron_rl.config import ConfigError, all_keys, from_mapping, load, schema, to_yaml
from megatron_rl.config.plain_yaml import read_yaml, write_yaml
from megatron_rl.config.schema import Format, Level, OnNonFinite, RejectRule
from megatron_rl.config.shape import key_of
from megatron_rl.config.unknown import REMOVED

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
    assert from_mapping(OmegaConf.to_container(OmegaConf.create(to_yaml(config)))) == config


@pytest.mark.parametrize(
    "preset", sorted((ROOT / "conf" / "correction").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_correction_preset_loads(recipe: Path, preset: Path) -> None:
    load(recipe, [f"correction={preset.stem}"])


def test_overrides_are_typed_and_win(recipe: Path) -> None:
    config = load(
        recipe,
        ["optim.lr=1e-4", "quantization.format=fp8", "learner.on_nonfinite=skip", "run.name=other"],
    )
    assert config.optim.lr == 1e-4
    assert config.quantization.format is Format.fp8
    assert config.learner.on_nonfinite is OnNonFinite.skip
    assert config.run.name == "other"
    assert config.learner.tensor_parallel == 2


def test_another_metric_stops_in_place_of_the_base_s(recipe: Path) -> None:
    recipe.write_text("run: {stop: {eval/accuracy: 0.28}}\n")
    assert load(recipe, ["run.stop.eval/accuracy=0.5"]).run.stop == {"eval/accuracy": 0.5}
    with pytest.raises(ConfigError, match=r"run\.stop=null takes out what a base names"):
        load(recipe, ["run.stop.eval/reward=1"])
    assert load(recipe, ["run.stop=null", "run.stop.eval/reward=1"]).run.stop == {
        "eval/reward": 1.0
    }


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
        ("quantization.format=int9", ["quantization.format", "int9", "int8"]),
        ("optim.lr=fast", ["optim.lr", "fast"]),
        ("correction=tsi", ["correction", "tsi", "tis"]),
        ("learner=5", ["learner", "5", "tensor_parallel"]),
        ("steps", ["steps", "section.key=value"]),
        ("correction.weight={low: 3, high: 2}", ["correction.weight"]),
        ("correction.reject=[{stta: ratio}]", ["correction.reject[0].stta", "stat"]),
        ("correction={anchor: sampler, weight: {level: token}}", ["correction"]),
    ],
)
def test_mistakes_name_the_key_and_the_way_out(
    recipe: Path, override: str, words: list[str]
) -> None:
    said = refusal(load, recipe, [override])
    assert all(word in said for word in words), said


@pytest.mark.parametrize("value", ["{a: 1}", "{}", "[1, 2]", "[[1]]", "[{a: 1}]", "{a: [{b: 1}]}"])
def test_a_mapping_for_a_list_or_a_list_for_a_mapping_names_the_key(
    tmp_path: Path, value: str
) -> None:
    """Whichever key it is: what is not named takes such a value."""
    overrides = [f"{key}={value}" for key in all_keys()]
    path = tmp_path / "mine.yaml"
    path.write_text("{}")
    given = refusal(load, path, overrides)
    named = {key_of(line) for line in given.splitlines()}
    assert len(named) > 100
    complaints = {}
    for key in set(all_keys()) - named:
        try:
            load(path, [f"{key}={value}"])
        except ConfigError as error:
            complaints[key] = str(error)
    assert all(key in said for key, said in complaints.items())
    path.write_text(write_yaml(_nested(dict.fromkeys(all_keys(), read_yaml(value)))))
    assert refusal(load, path) == given


def _nested(flat: dict[str, object]) -> dict[str, object]:
    nested: dict[str, object] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        inner: dict = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return nested


def test_a_removed_key_says_what_stands_in_its_place(recipe: Path) -> None:
    assert not REMOVED.keys() & set(all_keys())
    page = (ROOT / "docs" / "decisions" / "config_keys.md").read_text()
    for key, hint in REMOVED.items():
        assert refusal(load, recipe, [f"{key}=secret"]) == f"{key}: unknown key; {hint}"
        assert f"`{key}`" in page


BAD_VALUES = [
    # section, text below it, what the message must say: the key's path, its value, the way out
    (
        "correction",
        "weight: {high: -1}",
        "correction.weight.high is -1.0: a cap is above 0, or null",
    ),
    ("correction", "weight: {high: 0}", "correction.weight.high is 0.0: a cap is above 0, or null"),
    ("correction", "weight: {high: true}", "correction.weight.high is true: use a number, or null"),
    (
        "correction",
        "weight: {high: 'null'}",
        "correction.weight.high is 'null': use a number, or null",
    ),
    (
        "correction",
        "weight: {high: .inf}",
        "correction.weight.high is inf: give a finite number, or null",
    ),
    (
        "correction",
        "weight: {high: .nan}",
        "correction.weight.high is nan: give a finite number, or null",
    ),
    (
        "correction",
        "weight: {high: [0.5, 5]}",
        "correction.weight.high is [0.5, 5]: use a number, or null",
    ),
    (
        "correction",
        "weight: {high: 0.5_5}",
        "correction.weight.high is 0.5_5: one number, without `_`",
    ),
    (
        "correction",
        "weight: {high: '0.5_5'}",
        "correction.weight.high is 0.5_5: one number, without `_`",
    ),
    (
        "correction",
        "weight: {high: 0.5_5.0}",
        "correction.weight.high is 0.5_5.0: one number, without `_`",
    ),
    ("correction", "weight: {high: 2_5}", "correction.weight.high is 2_5: one number, without `_`"),
    (
        "correction",
        "weight: {level: null}",
        "correction.weight.level is null: use one of none, token, sequence",
    ),
    (
        "correction",
        "weight: {level: Token}",
        "correction.weight.level is Token: did you mean token?",
    ),
    ("correction", "weight: {level: [token]}", "correction.weight.level is ['token']"),
    ("correction", "weight: {normalize: 2}", "correction.weight.normalize is 2: use true or false"),
    (
        "correction",
        "weight: {target_ess: 95%}",
        "correction.weight.target_ess is 95%: use a number, or null",
    ),
    (
        "correction",
        "weight: {High: 3}",
        "correction.weight.High: unknown key; did you mean correction.weight.high?",
    ),
    (
        "correction",
        "weight: {cap: 3}",
        "correction.weight.cap: unknown key; known here: level, aggregate",
    ),
    (
        "correction",
        "weight: null",
        "correction.weight is null: it is a section; its keys are level, aggregate",
    ),
    ("correction", "high: 3", "correction.high: unknown key; did you mean correction.weight.high?"),
    (
        "correction",
        "non_finite: ignore",
        "correction.non_finite is ignore: use one of drop, one, zero, reject, raise",
    ),
    (
        "correction",
        "reject: 5",
        "correction.reject is 5: it is a list, such as [{level: token, stat: ratio, ...}]",
    ),
    (
        "correction",
        "reject: {level: token, stat: ratio, high: 3}",
        "correction.reject is {'level': 'token'",
    ),
    ("correction", "reject: [null]", "correction.reject[0] is null: it is a section"),
    (
        "correction",
        "reject: [{level: token, high: 3}]",
        "correction.reject[0].stat is missing: use one of ratio, k1",
    ),
    (
        "correction",
        "reject: [{stat: k1, reduce: sum, high: 3}]",
        "reject[0].level is missing: use one of token, sequ",
    ),
    (
        "correction",
        "reject: [{level: token, stat: k2, high: 0.1_2}]",
        "reject[0].high is 0.1_2: one number",
    ),
    ("loss", "name: grpo", "loss.name is grpo: use one of ppo, gspo"),
    ("loss", "clip_low: null", "loss.clip_low is null: use a number"),
    ("loss", "clip_low: .nan", "loss.clip_low is nan: give a finite number"),
    ("loss", "reduction: mean", "loss.reduction is mean: use one of token_mean"),
    ("advantage", "estimator: GRPO", "advantage.estimator is GRPO: did you mean grpo?"),
    (
        "reward",
        "overlong_buffer: -1",
        "reward.overlong_buffer is -1: it is part of rollout.max_response_tokens: 512",
    ),
    (
        "reward",
        "overlong_buffer: 513",
        "reward.overlong_buffer is 513: it is part of rollout.max_response_tokens",
    ),
    ("reward", "overlong_buffer: 4.5", "reward.overlong_buffer is 4.5: use a whole number"),
    (
        "reward",
        "overlong_penalty: -1",
        "reward.overlong_penalty is -1.0: it is subtracted; use 0 or more",
    ),
    ("reward", "wrong: -2", "reward.wrong: -2, expected -1 to 0"),
    (
        "reward",
        "name: {math_dapo: much}",
        "reward.name is {'math_dapo': 'much'}: use the name of a reward, or",
    ),
    (
        "data",
        "train: {rows.jsonl: 0}",
        "data.train is {'rows.jsonl': 0}: name a file, or a mapping of files",
    ),
    ("rollout", "dynamic_samplig: true", "did you mean rollout.dynamic_sampling?"),
    ("run", "stop: {eval/accuracy: high}", "run.stop.eval/accuracy: Value 'high'"),
    (
        "run",
        "stop: {eval/accuracy: .nan}",
        "run.stop: {'eval/accuracy': nan}, expected one metric of eval/ and a",
    ),
    ("run", "stop: {eval/accuracy: 0.3, eval/reward: 1}", "one metric of eval/"),
    ("run", "stop: {}", "run.stop: {}, expected one metric of eval/"),
    ("run", "stop: {train/loss: 1}", "run.stop: {'train/loss': 1.0}, expected one metric of eval/"),
    ("run", "stop: eval/accuracy", "run.stop is eval/accuracy: use a section, or null"),
    ("sampler", "formats: [int9]", "sampler.formats[0]: Invalid value 'int9'"),
]


@pytest.mark.parametrize(("section", "text", "said"), BAD_VALUES)
def test_a_bad_value_is_refused_alone_and_in_words(
    tmp_path: Path, section: str, text: str, said: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"{section}:\n  {text}\n")
    (found,) = refusal(load, path).splitlines()
    assert said in found


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["quantization.format=fp8_block"],
            "with quantization.format=fp8_block: built for int8 and fp8 so far",
        ),
        (["learner.tensor_parallel=2", "sampler.tensor_parallel=3"], "one has to divide the other"),
        *(
            (["run.device=cuda", *more], "use bf16 with run.device=cuda")
            for more in ([], ["quantization=fp8"])
        ),
        (
            ["sampler.engines=2", "sampler.formats=[int8, none]"],
            "the engines have int8, none; use bf16",
        ),
    ],
)
def test_where_the_learner_cannot_compute_as_the_sampler(
    recipe: Path, overrides: list[str], said: str
) -> None:
    for format in ("int8", "fp8", "none"):
        load(recipe, ["learner.forward=as_sampler", f"quantization={format}"])
    assert said in refusal(
        load, recipe, ["learner.forward=as_sampler", "quantization=int8", *overrides]
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["lora.rank=0", "lora.alpha=4"],
            "learner.lora.alpha: nothing uses it while learner.lora.rank is 0",
        ),
        (
            ["forward=as_sampler"],
            "learner.forward: as_sampler with learner.lora.rank=8: not built for adapters; use "
            "bf16",
        ),
        (
            ["lora.targets=[]"],
            "learner.lora.targets: none, with learner.lora.rank=8; use [all-linear]",
        ),
        (["lora.alpha=0"], "learner.lora.alpha: 0"),
    ],
)
def test_where_adapters_cannot_be_trained(recipe: Path, overrides: list[str], said: str) -> None:
    given = ["quantization=int8", "learner.lora.rank=8"]
    assert load(recipe, given).learner.lora.rank == 8
    assert said in refusal(
        load, recipe, [*given, *(f"learner.{override}" for override in overrides)]
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "sampler.routed_experts=false",
            "nobody tells the sampler's choices; set sampler.routed_experts=true",
        ),
        ("rollout.source=dataset", "come from no sampler; use own"),
        ("learner.megatron={moe_aux_loss_coeff: 0.01}", "which nobody takes; use 0"),
        ("learner.megatron={moe_router_fusion: true}", "which asks nobody; use false"),
    ],
)
def test_where_the_sampler_s_experts_cannot_be_taken(
    recipe: Path, override: str, said: str
) -> None:
    given = ["sampler.routed_experts=true", "learner.router=replay"]
    assert load(recipe, given).learner.router == "replay"
    assert said in refusal(load, recipe, [*given, override])


@pytest.mark.parametrize(
    "name",
    [
        "tsi",
        "TIS",
        "tis.yaml",
        "../base",
        "''",
        "5",
        "true",
        "null",
        "[tis]",
        "{preset: [tis]}",
        "{preset: 5}",
    ],
)
def test_what_is_no_preset_is_refused_with_the_list(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(f"correction: {name}\n")
    said = refusal(load, path)
    assert re.search(r"correction is .*: no preset; .*presets are adaptive, bypass, ", said)
    assert ("did you mean tis?" in said) == (name in ("tsi", "TIS", "tis.yaml"))


def test_everything_wrong_is_said_at_once_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "correction: {anchor: samplr, weight: {high: two, hihg: 3}, reject: [{high: 3}]}\n"
        "loss: {name: rollout_is, clip_low: -1}\n"
        "advantage: {estimator: rloo}\nrollout: {samples_per_prompt: 1}\n"
    )
    said = [line.split(" is ")[0].split(":")[0] for line in refusal(load, path).splitlines()]
    # not that rollout_is needs another anchor: which anchor was meant is not known
    correction = ("anchor", "weight.high", "weight.hihg", "reject[0].level", "reject[0].stat")
    assert said == [
        *(f"correction.{key}" for key in correction),
        "loss.clip_low",
        "rollout.samples_per_prompt",
    ]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("correction.weight.high=", "null for no value"),  # an unset variable of a shell
        *(
            (f"run.name={text}", rf"run\.name is {said}: ")
            for text, said in (("1.10", r"1\.1"), ("no", "false"))
        ),
        ("correction.weight.high=0.5_5", "correction.weight.high is 0.5_5: one number"),
        ("correction.weight.high={", "not find|expected"),
        ("correction.reject[0].high=3", r"did you mean correction\.reject\?"),
        ("correction.reject.0.high=3", "an override replaces all of it"),
        ("correction.preset=nonsense", "correction is nonsense: no preset"),
        (
            "run.seed=${oc.env:SEED}",
            r"run\.seed holds \$\{oc\.env:\.\.\.\}: a recipe reads no environment",
        ),
        ("run.name=${oc.${run.root}:X}", r"run\.name holds .* reads no environment"),
        ("run.root=a${run.seed}${oc.decode:'1'}", r"run\.root holds .* reads no environment"),
        ("data={train: '${oc.env:HOME}'}", r"data\.train holds .* reads no environment"),
        (
            "sampler.vllm={a: [{b: '${oc.env:WANDB_API_KEY}'}]}",
            r"sampler\.vllm holds .* reads no environment",
        ),
        (
            "correction.weight.high=${x}",
            r"correction\.weight\.high: Interpolation key 'x' not found",
        ),
    ],
)
def test_bad_overrides(recipe: Path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(recipe, [override])


FRESH_ONLY = "correction.reject=[{level: token, stat: staleness, high: 0}]"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["correction=none"],
            r"rollout\.ahead: 1 trains on answers of older policies.* use correction=tis",
        ),
        (
            ["correction=none", "loss.name=reinforce", "correction.anchor=sampler"],
            "nothing here corrects",
        ),
        (["sync.every=3", "eval.every=9"], r"sync\.every: 3 with rollout\.ahead: 1: .* at most 2"),
        (["sampler.sleep=offload"], r"sampler\.sleep: offload with rollout\.ahead: 1"),
        (
            ["rollout.in_flight=continue", "sync.transport=nccl"],
            r"in_flight: continue with sync\.transport=nccl",
        ),
        (["rollout.ahead=65"], r"rollout\.ahead"),
        ([FRESH_ONLY], r"reject\[0\]\.high: 0 with rollout\.ahead: 1 rejects all answers"),
        (["correction=none", FRESH_ONLY, "rollout.in_flight=continue"], "nothing here corrects"),
        (["rollout.in_flight_cache=keep"], r"in_flight_cache: keep with rollout\.in_flight=finish"),
        (["rollout.in_flight=contine"], r"rollout\.in_flight.*(finish|continue)"),
    ],
)
def test_what_does_not_go_with_rollouts_ahead(
    recipe: Path, overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load(recipe, ["rollout.ahead=1", *overrides])


def test_what_does_go_with_rollouts_ahead(recipe: Path) -> None:
    load(recipe, ["rollout.ahead=1", "correction=bypass"])
    load(recipe, ["rollout.ahead=1", "rollout.in_flight=continue", "sync.staged=false", FRESH_ONLY])
    late = ["rollout.ahead=2", "sync.every=3", "eval.every=9"]
    load(recipe, [*late, "rollout.in_flight=continue"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: 5\n", "base is 5"),
        ("base: [5]\n", r"base is \[5\]"),
        ("- run\n", "expected keys such as"),
        ("run: {steps: 1}\nrun: {steps: 2}\n", "run is given twice.* line 2"),
        ("run: !!int x\n", "not readable as YAML"),
        ("optim: {lr: [\n", r"bad\.yaml"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load(path)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        *(
            ("correction", f"preset: tis\n  weight: {{{text}}}")
            for text in ("high: 4", "high: null, low: 1e-4")
        ),
        ("correction", "preset: tis\n  weight: {high: 5., low: .5, normalize: yes}"),
        ("correction", "preset: seq_tis\n  weight: {target_ess: 1, high: null}"),
        *(
            ("correction", f"preset: icepop\n  {text}")
            for text in ("weight: {high: null}", "non_finite: raise")
        ),
        ("correction", "preset: geo_mask\n  reject: []"),
        *(
            ("correction", f"reject: [{{level: token, stat: {text}}}]")
            for text in ("ratio, low: 1E-4", "k1, high: 0")
        ),
        (
            "correction",
            "reject: [{level: sequence, stat: k1, reduce: mean, high: 0.05, when: "
            "negative_advantage}]",
        ),
        ("correction", "reject: [{level: sequence, stat: m2, reduce: mean, budget: 1e-3}]"),
        ("correction", "reject: [{level: token, stat: abs, budget: 1.02}]"),
        (
            "correction",
            "preset: bypass\n  reject: [{level: sequence, stat: ratio, reduce: mean, high: 1.01}]",
        ),
        ("loss", "name: cispo\n  absolute: true\n  clip_high: 5"),
        ("loss", "name: ppo\n  clip_low: 0\n  clip_high: 0\n  dual_clip: 3"),
        ("loss", "name: gspo\n  clip_low: 3e-4\n  clip_high: 4e-4"),
        (
            "advantage",
            "estimator: reinforce_pp\nrollout: {samples_per_prompt: 1, dynamic_sampling: false}",
        ),
        ("reward", "overlong_buffer: 512\n  overlong_filter: true"),
        ("reward", "overlong_buffer: 4\n  overlong_penalty: 0\nadvantage: {estimator: maxrl}"),
        ("rollout", "max_response_tokens: 20_480"),
        ("run", "name: 2024_05"),
    ],
)
def test_good_values_load_and_survive_a_round_trip(tmp_path: Path, section: str, text: str) -> None:
    path = tmp_path / "good.yaml"
    path.write_text(f"{section}:\n  {text}\n")
    config = load(path)
    assert from_mapping(read_yaml(to_yaml(config))) == config


def test_numbers_are_what_was_written(recipe: Path) -> None:
    config = load(
        recipe, ["optim.lr=1e-6", "rollout.max_response_tokens=20_480", "run.name=2024_05"]
    )
    assert (config.optim.lr, config.rollout.max_response_tokens, config.run.name) == (
        1e-6,
        20480,
        "2024_05",
    )
    assert load(recipe, ["correction.weight.low=1e-4"]).correction.weight.low == 1e-4
    assert "on_nonfinite: raise\n" in to_yaml(config)  # not the member's name, raise_


def test_the_guide_explains_every_knob_and_every_preset() -> None:
    guide = (ROOT / "docs" / "corrections.md").read_text()
    words = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`\n]+)`", guide))))
    sections = (
        "correction.",
        "loss.",
        "advantage.",
        "reward.overlong",
        "reward.learner",
        "rollout.dynamic",
    )
    knobs = {key.rpartition(".")[2] for key in all_keys() if key.startswith(sections)}
    knobs |= {field.name for field in fields(RejectRule)} | {"max_gen_batches"}
    enums = [
        "Level",
        "Aggregate",
        "Outside",
        "Stat",
        "Reduce",
        "When",
        "NonFinite",
        "Estimator",
        "LossName",
    ]
    enums += ["Reduction", "Divergence", "TrustRegion"]
    values = {str(value) for name in enums for value in getattr(schema, name)}
    presets = {path.stem for path in (ROOT / "conf" / "correction").glob("*.yaml")}
    assert (knobs | values | presets) - words == set()
