"""Refusals of the command line: by key, with the way out, before anything starts."""

import os
from pathlib import Path

import pytest
from helpers import Command

from megatron_rl import cli
from megatron_rl.commands import train
from megatron_rl.config.schema import Config, Device, Format
from megatron_rl.preflight.machine import named
from megatron_rl.quantization.formats import format_problem

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.init=pretrained", "model.path model.init=random"),
        ("rollout.max_prompt_tokens=3", "rollout.max_prompt_tokens data.long_prompts=drop"),
        ("quantization.format=fp8_block", "quantization.format CPU"),
        ("run.device=cuda", "run.device cpu or auto"),
        ("learner.megatron.num_moe_expert=2", "learner.megatron.num_moe_expert num_moe_experts"),
        ("learner.megatron.fp8=hybrid", "learner.megatron.fp8 leave it out"),
        ("loss.name=ppo", "loss.name rollout.source=dataset"),
        ("data.answer_key=anwser", "data.answer_key answer"),
        ("rollout.top_p=0.9", "rollout.top_p rollout.top_k"),
        ("sampler.vllm.logprobs_mode=raw_logprobs", "sampler.vllm.logprobs_mode remove it"),
        ("log.wandb=online", "log.wandb WANDB_API_KEY"),
        ("log.trackers=[tensorbord]", "log.trackers tensorboard"),
        ("log.trackers=[trackio]", "log.trackers pip install trackio"),
        ("log.wandb_run.tag=[a]", "log.wandb_run.tag tags"),
        ("log.wandb_run.tags=[{a: 1}]", "log.wandb_run.tags [baseline]"),
    ],
)
def test_bad_input_is_refused(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch, override: str, words: str
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(place))  # no key of a real user
    said = command.refused(override, dry=False)
    assert all(word in said for word in words.split()), said
    assert not (place / "runs").exists()


def test_a_used_run_directory_is_refused_with_the_ways_out(place: Path, command: Command) -> None:
    used = place / "runs" / "mine"
    used.mkdir(parents=True)
    (used / "metrics.jsonl").write_text('{"progress/step": 0}\n')
    ways = ("runs/mine", "run.name=", "run.if_exists=archive")
    said = command.refused(dry=False)
    assert all(word in said for word in ways)
    # a dry run needs no directory
    (note,) = [line for line in command.dry_run().splitlines() if line.startswith("note:")]
    assert all(word in note for word in ways)
    assert (used / "metrics.jsonl").read_text() == '{"progress/step": 0}\n'


def test_formats_by_machine() -> None:
    assert all(format_problem(form, Device.cuda, "Hopper", 9.0) is None for form in Format)
    assert format_problem(Format.int8, Device.cuda, "Ampere", 8.0) is None
    assert "8.9" in str(format_problem(Format.fp8, Device.cuda, "Ampere", 8.0))


def test_a_dry_run_says_the_plan_and_writes_nothing(place: Path, command: Command) -> None:
    before = sorted(place.rglob("*"))
    said = command.dry_run("run.name=other")
    assert all(
        word in said for word in ("runs/other", "TP2", "int8", "2 ranks", "nothing was written")
    )
    assert sorted(place.rglob("*")) == before


def test_a_grid_of_runs_names_the_tool_that_makes_them(command: Command) -> None:
    grids = [path for path in (ROOT / "recipes").glob("*.yaml") if "\naxes:" in path.read_text()]
    for path in grids:
        for words in (
            ["train", path],
            ["train", path, "--dry-run"],
            ["plan", path],
        ):
            (line,) = command(*words, status=2).splitlines()
            assert line.endswith(f"python tools/compare_corrections.py {path}")


@pytest.mark.parametrize(
    ("machine", "planner", "level"),
    [
        ("1x8xH100-80", True, "none"),
        ("1x8xH100-80", False, "full"),
        (None, True, "none"),
    ],
)
@pytest.mark.usefixtures("place")
def test_what_is_recomputed_is_decided_before_the_ranks_start(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    machine: str | None,
    planner: bool,
    level: str,
) -> None:
    started: list[Config] = []
    monkeypatch.setattr(
        "megatron_rl.supervision.launch.launch", lambda config, report: started.append(config) or 0
    )
    if machine:
        monkeypatch.setattr("megatron_rl.preflight.checks.detect", lambda wanted: named(machine))
    if not planner:
        monkeypatch.setattr(train, "app", lambda module: None)
    assert (
        cli.main(
            [
                "train",
                "mine.yaml",
                *(["sampler.devices='7'"] if machine else []),
            ]
        )
        == 0
    )
    assert [config.learner.recompute for config in started] == [level]
    assert (f"WARNING check: learner.recompute=auto: {level}, " in capsys.readouterr().err) == bool(
        machine
    )


def test_print_config_is_a_recipe(place: Path, command: Command) -> None:
    printed = command("train", "mine.yaml", "--print-config")
    (place / "again.yaml").write_text(printed)
    assert command("train", "again.yaml", "--print-config") == printed


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "mine.yaml", "--dryrun"],
        ["toy", "folder", "a=b", "--c"],
        [],
    ],
)
def test_unknown_arguments_are_refused(arguments: list[str], place: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["train", "x" * 300],
        ["toy", f"{__file__}/x"],
        ["status", "x" * 300],
    ],
)
def test_a_path_that_cannot_be_is_named(words: list[str], command: Command) -> None:
    assert words[1] in command(*words, status=2)


@pytest.mark.usefixtures("place")
@pytest.mark.fault(
    "a job's number of tasks is not the recipe's number of ranks",
    "its check says so, before the ranks",
)
def test_the_number_of_tasks_is_checked(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--ranks", "slurm", "learner.tensor_parallel=2"]
    monkeypatch.setenv("SLURM_NTASKS", "4")
    said = command.refused(*words)
    assert "4 processes" in said
    assert "is 2" in said
    monkeypatch.setenv("SLURM_NTASKS", "2")
    command.dry_run(*words)


@pytest.mark.fault("a reward reads a variable that it is not given", "a dry run finds it")
def test_a_reward_is_checked_with_what_it_will_see(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os\nKEY = os.environ['JUDGE_KEY']\ndef judge(row, key, text): return 1.0\n"
    (place / "judging.py").write_text(text)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge = "reward.name=judging:judge"
    given = "run.variables=[JUDGE_KEY{}]"
    assert "KeyError: 'JUDGE_KEY'" in command.refused(judge)
    command.dry_run(judge, given.format(""))
    assert "run.variables: OTHER not set" in command.refused(judge, given.format(", OTHER"))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train mine.yaml --explain=", "'': no key"),
        ("plan mine.yaml --precision --replicas -5", "--replicas -5"),
        ("toy pipe", "pipe/train.jsonl"),
        ("toy tokens", "tokens/model/tokenizer.json"),
    ],
)
def test_odd_words_are_refused(command: Command, words: str, said: str) -> None:
    for name in ("pipe/train.jsonl", "tokens/model/tokenizer.json"):
        Path(name).parent.mkdir(parents=True)
        os.mkfifo(name)
    assert said in command(*words.split(), status=2)


@pytest.mark.parametrize("words", [["toy"], ["eval", "run", "-o"]])
def test_no_name_is_no_folder(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([*words, ""])
    assert "an empty name" in capsys.readouterr().err
