"""`megatron-rl plan --precision` and `--fit`: seconds by format, where low ones pay, costs from
runs; the page.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import Command, block, refusal, typed

from megatron_rl.config import from_mapping, to_yaml
from megatron_rl.config.schema import Device
from megatron_rl.data.toy import write_toy
from megatron_rl.models.model import read_hf_config
from megatron_rl.preflight.machine import Machine, named
from megatron_rl.workshop.planner import precision
from megatron_rl.workshop.planner.case import Assumptions, Case
from megatron_rl.workshop.planner.fit import Costs, fitted, measured, seconds_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "precision.md"
DAPO, WIDE = (
    str(ROOT / "recipes" / f"{name}.yaml") for name in ("dapo_fp8", "dapo-qwen3_32b-1n8g-int8")
)
HOST = Machine(Device.cpu, "x86_64 CPU")
PHASES = ("rollout", "prox", "update", "sync")
# a machine that is slow at what formats differ in
TRUE = Costs(
    {
        ("rollout", "int8 products"): 6.0,
        ("rollout", "rounding fp8"): 3.0,
        ("rollout", "layer"): 0.5,
    },
    {"rollout": 1.3, "prox": 2.0, "update": 2.0, "sync": 4.0},
)


def case(
    place: Path, format: str = "none", width: int = 1, answer: int = 64, **rollout: Any
) -> Case:
    hf_config = read_hf_config(place / "data/toy/model")
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    hf_config |= {name: hf_config[name] * width for name in sizes}
    folder = place / f"model_{width}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config))
    sizes_of_step = {"prompts_per_step": 8, "samples_per_prompt": 8, "max_prompt_tokens": 16}
    config = from_mapping(
        {
            "model": {"path": str(folder)},
            "run": {"device": "cpu"},
            "quantization": {"format": format},
            "rollout": sizes_of_step | {"max_response_tokens": answer} | rollout,
        }
    )
    return Case(config, hf_config, HOST, replace(Assumptions(), response=0.5, prompt=0.5))


def a_run(
    place: Path,
    name: str,
    case: Case,
    steps: int = 12,
    slow: int = 3,
    devices: tuple[str, ...] = (),
) -> Path:
    """A run's folder of the `TRUE` machine; other causes slowed down `slow` of its steps."""
    run = place / "runs" / name
    work = case.work
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(case.config))
    (run / "env.json").write_text(json.dumps({"devices": devices}))
    seconds = TRUE.phases(case)
    line: dict[str, float] = {
        "rollout/n": work.sequences,
        "rollout/response_tokens_mean": work.response,
        "rollout/response_tokens_max": case.config.rollout.max_response_tokens,
        "rollout/prompt_tokens_mean": work.prompt,
        "rollout_corr/rollout_is_eff_sample_size": 0.9,
        "sync/total_s": seconds["sync"],
    } | {f"time/{phase}": seconds[phase] for phase in PHASES[:3]}
    warming = {"time/rollout": 9 * seconds["rollout"]}
    kinds = (
        [warming] * 2
        + [{"time/rollout": 5 * seconds["rollout"]}] * slow
        + [{}] * (steps - 2 - slow)
    )
    rows = [
        json.dumps(line | more | {"progress/step": step}) + "\n"
        for step, more in enumerate(kinds, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(rows))
    return run


@pytest.fixture
def place(empty: Path) -> Path:
    write_toy(empty / "data" / "toy")
    return empty


def rows(command: Command, *words: object) -> dict[str, dict[str, Any]]:
    said = command("plan", *words, "--precision", "--json")
    return {row["name"]: row for row in json.loads(said)}


def test_a_node_of_gpus(command: Command) -> None:
    found = rows(command, DAPO, "--on", "1x8xH100-80")
    assert list(found) == ["BF16", "INT8", "FP8", "FP8, FP8 cache"]
    plain = found["BF16"]
    fp8 = found["FP8"]
    cache = found["FP8, FP8 cache"]
    assert plain["ratio"] == 1
    assert plain["quantizing"] == 0 < fp8["quantizing"] < fp8["seconds"]["sync"]
    assert cache["seconds"]["rollout"] < fp8["seconds"]["rollout"] < plain["seconds"]["rollout"]
    assert fp8["seconds"]["sync"] < plain["seconds"]["sync"]
    assert fp8["seconds"]["update"] == plain["seconds"]["update"]
    for row in found.values():
        assert row["step"] == pytest.approx(sum(row["seconds"].values()))
        assert row["ratio"] == pytest.approx(row["step"] / plain["step"])
    ahead = rows(command, ROOT / "recipes/dapo-qwen3_8b-1n8g-int8-ahead.yaml")["FP8"]
    shorter = min(
        ahead["seconds"]["rollout"], ahead["seconds"]["prox"] + ahead["seconds"]["update"]
    )
    assert ahead["step"] == pytest.approx(sum(ahead["seconds"].values()) - shorter)


@pytest.mark.parametrize(
    ("machine", "without"), [("1x8xB200", {"INT8"}), ("1x8xA100-80", {"FP8", "FP8, FP8 cache"})]
)
def test_what_a_gpu_does_not_run_is_left_out(
    command: Command, machine: str, without: set[str]
) -> None:
    assert precision.NAMES.keys() - rows(command, DAPO, "--on", machine).keys() == without
    said = command("plan", DAPO, "--on", machine, "--precision")
    assert all(f"left out  {name}: " in said for name in sorted(without)[:1])
    command("plan", WIDE, "--on", machine, "--precision")  # no model is far wider


def test_a_break_even_is_where_a_step_takes_as_long(place: Path) -> None:
    base = case(place, answer=64)
    costs = Costs(
        {
            ("rollout", "int8 products"): 0.1,
            ("rollout", "calls int8"): 0.4,
            ("rollout", "layer"): 0.2,
        },
        {},
    )
    where = dict(precision._breaks(base, "INT8", costs))["answers in a step"]
    word, number = where.split()
    assert word == "above"
    samples = base.config.rollout.samples_per_prompt
    ratios = [
        precision._step(costs, precision._with(at, "INT8"))
        / precision._step(costs, precision._with(at, "BF16"))
        for share in (0.7, 1.0, 1.4)
        for at in [
            case(
                place,
                answer=64,
                prompts_per_step=round(float(number.replace(",", "")) / samples * share),
            )
        ]
    ]
    assert ratios[0] > 1 > ratios[2]
    assert abs(ratios[1] - 1) < 0.3 * min(ratios[0] - 1, 1 - ratios[2])


def test_costs_of_runs_carry_over_to_other_sizes_and_lengths(place: Path) -> None:
    runs = [
        measured(a_run(place, f"{format}_{width}", case(place, format, width, answer)), HOST)
        for width, answer in ((2, 64), (6, 32))
        for format in ("none", "int8", "fp8")
    ]
    costs = [TRUE, fitted(runs), fitted([])]
    for width, answer in ((4, 128), (8, 16), (4, 16)):
        plain, int8, fp8 = (
            [sum(of.phases(case(place, format, width, answer)).values()) for of in costs]
            for format in ("none", "int8", "fp8")
        )
        for low in (int8, fp8):
            true, planned, assumed = (one / other for one, other in zip(low, plain, strict=True))
            assert planned == pytest.approx(true, rel=0.06)
            # what is assumed is another machine
            assert abs(planned - true) < abs(assumed - true) / 2
        assert plain[1] == pytest.approx(plain[0], rel=0.1)


def test_what_fills_no_block_is_prefilled_for_each_answer(place: Path) -> None:
    """As engines do: tests/sampler/test_prefix_cache.py."""

    def products(length: int, **sampler: Any) -> float:
        one = case(place, max_prompt_tokens=2 * length, max_response_tokens=64)
        one = replace(
            one, config=replace(one.config, sampler=replace(one.config.sampler, vllm=sampler))
        )
        return seconds_of(one)["rollout", "none products"]

    token = products(2) - products(1)
    assert products(127) - products(1) == pytest.approx(126 * token)
    assert products(1) - products(128) == pytest.approx((1 - 128 / 8) * token)
    assert products(130) - products(128) == pytest.approx(2 * token)
    assert products(33, block_size=32) - products(1) == pytest.approx(32 / 8 * token)
    assert products(130, enable_prefix_caching=False) - products(1) == pytest.approx(129 * token)


def test_one_run_tells_one_factor_and_the_others_are_called_assumed(
    place: Path, command: Command
) -> None:
    run = a_run(place, "int8", case(place, "int8"))
    found = measured(run, HOST)
    # slow steps left out
    assert fitted([found]).phases(found.case) == pytest.approx({**found.seconds}, rel=0.01)
    recipe = place / "mine.yaml"
    recipe.write_text(
        f"base: {ROOT}/recipes/quickstart.yaml\nmodel: {{path: {place}/data/toy/model}}\n"
    )
    rows_of = rows(command, recipe, "--fit", run)
    assert [name for name, row in rows_of.items() if row["assumed"]] == ["BF16", "FP8"]
    assert [row["sample_size"] for row in rows_of.values()] == [None, pytest.approx(0.9), None]
    said = command("plan", recipe, "--precision", "--fit", run)
    assert "FP8 (assumed)" in said
    assert f"{run} (int8, 10 steps)" in said
    assert "(50% of it the mean)" in said  # the run's lengths
    assert "left out  FP8, FP8 cache: quantization.kv_cache" in said
    said = command("plan", recipe, "--precision", "--fit", run, "--assume", "response=0.25")
    assert "(25% of it the mean)" in said


def test_runs_of_gpus_scale_the_plan_s_phases(place: Path) -> None:
    machine = named("1x8xH100-80")
    on_gpus = replace(case(place, "fp8"), machine=machine)
    run = measured(a_run(place, "gpus", on_gpus, devices=("H100",)), machine)
    assert fitted([run]).phases(run.case) == pytest.approx({**run.seconds}, rel=0.01)


def test_what_is_no_run_is_refused_with_the_way_out(place: Path) -> None:
    assert "no metrics.jsonl" in refusal(measured, Path("here"), HOST)
    few = a_run(place, "few", case(place), steps=5, slow=0)
    assert "5 are needed" in refusal(measured, few, HOST)
    host = a_run(place, "host", case(place))
    assert "ran on a host" in refusal(measured, host, named("1x8xH100-80"))
    gpus = a_run(place, "gpus", case(place), devices=("H100",))
    assert "ran on GPUs" in refusal(measured, gpus, HOST)
    (place / "model_1" / "config.json").unlink()
    assert "plan in the folder" in refusal(measured, host, HOST)


def test_fit_alone_is_refused(command: Command) -> None:
    said = command("plan", DAPO, "--fit", "runs/mine", status=2)
    assert "--precision" in said


def test_the_page_s_commands(place: Path) -> None:
    (place / "recipes").symlink_to(ROOT / "recipes")
    for line in block(PAGE, "bash").splitlines():
        assert "FP8, FP8 cache" in typed(place, line)
    for format in ("none", "int8", "fp8"):
        a_run(place, format, case(place, format))
    assert "(assumed)" not in typed(place, block(PAGE, "sh", 1))


@pytest.mark.engine
@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_the_page_s_runs(place: Path) -> None:
    (place / "recipes").symlink_to(ROOT / "recipes")
    for line in block(PAGE, "sh", 0).splitlines():
        typed(place, line.replace("run.steps=20", "rollout.prompts_per_step=4 run.steps=7"))
    said = typed(place, block(PAGE, "sh", 1))
    assert all(f"runs/{name} ({name}, 5 steps)" in said for name in ("none", "int8", "fp8"))
