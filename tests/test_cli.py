"""The command line refuses what cannot run: by key, with the way out, before anything is started or written."""

from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.config import load
from megatron_rl.config.schema import Device, Format
from megatron_rl.preflight import checks
from megatron_rl.preflight.machine import Machine
from megatron_rl.quantization.formats import format_problem

ROOT = Path(__file__).parent.parent


def refused(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    assert cli.main(["train", "mine.yaml", *overrides]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert all(line.startswith("error: ") for line in said.splitlines())
    return said


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.tensor_paralel=2", ["learner.tensor_paralel", "did you mean learner.tensor_parallel"]),
        ("data.train=missing.jsonl", ["data.train", "missing.jsonl", "megatron-rl toy"]),
        ("model.path=nowhere", ["model.path", "nowhere", "config.json"]),
        ("model.init=pretrained", ["model.path", ".safetensors", "model.init=random"]),
        ("learner.tensor_parallel=3", ["learner.tensor_parallel=3", "4 attention heads", "nearest valid"]),
        ("learner.pipeline_parallel=3", ["learner.pipeline_parallel=3", "2 layers"]),
        ("rollout.max_response_tokens=60", ["rollout.max_response_tokens", "72", "context is 64"]),
        ("rollout.max_prompt_tokens=3", ["rollout.max_prompt_tokens: 3", "longer", "data.long_prompts=drop"]),
        ("quantization=fp8_block", ["quantization", "no preset"]),
        ("quantization.format=fp8_block", ["quantization.format", "no CPU kernel", "fp8"]),
        ("quantization.smoothing=1.5", ["quantization.smoothing: 1.5", "0 < alpha < 1", "null"]),
        ("quantization={preset: fp8, smoothing: 0.5}", ["quantization.smoothing: 0.5", "int8", "null"]),
        ("run.stop={train/accuracy: 0.5}", ["run.stop", "train/accuracy", "one metric of eval/"]),
        ("run.device=cuda", ["run.device", "cuda", "cpu or auto"]),
        ("sync.transport=nccl", ["sync.transport", "nccl", "file"]),
        ("learner.megatron.num_moe_expert=2", ["learner.megatron.num_moe_expert", "num_moe_experts"]),
        ("learner.megatron.fp8=hybrid", ["learner.megatron.fp8", "GPU", "leave it out"]),
        ("reward.name=exact_macth", ["reward.name", "exact_match"]),
        ("loss.name=ppo", ["loss.name", "rollout.source=dataset"]),
        ("correction={weight: {high: -1}}", ["correction.weight.high", "-1"]),
        ("optim.lr=0", ["optim.lr", "above 0"]),
        (
            "learner.megatron.virtual_pipeline_model_parallel_size=2",
            ["virtual_pipeline_model_parallel_size: 2", "null"],
        ),
        ("eval.max_response_tokens=0", ["eval.max_response_tokens", "null"]),
        ("model=foo", ["model", "foo", "path"]),
        ("learner.context_parallel=2", ["learner.context_parallel", "not built", "leave it out"]),
        ("optim.decay=step", ["optim.decay", "step", "cosine"]),
        ("data.answer_key=anwser", ["data.answer_key", "anwser", "answer"]),
        ("rollout.top_p=0.9", ["rollout.top_p: 0.9", "set rollout.top_k"]),
        ("rollout.top_k=4000", ["rollout.top_k: 4000", "at most 1024"]),
        ("sampler.vllm.logprobs_mode=raw_logprobs", ["sampler.vllm.logprobs_mode", "remove it"]),
        ("sampler.devices='4,x'", ["sampler.devices", "4,x"]),
        ("sampler.devices='4,5'", ["sampler.devices", "2 GPUs", "sampler.tensor_parallel=1"]),
        ("sampler.devices=[4, 5]", ["sampler.devices", "2 GPUs", "sampler.tensor_parallel=1"]),
        ("sampler.devices=[4, 4]", ["sampler.devices: [4, 4]", "each once"]),
        ("eval.every=7", ["eval.every", "sync.every=5"]),
        ("log.wandb=online", ["log.wandb"]),
    ],
)
def test_bad_input_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, override: str, words: list[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(place))  # no key of a real user
    said = refused(capsys, override)
    assert all(word in said for word in words), said
    assert not (place / "runs").exists()


def test_every_problem_is_reported_at_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "learner.tensor_parallel=3", "data.train=missing.jsonl", "optim.lr=-1")
    assert all(key in said for key in ("learner.tensor_parallel", "data.train", "optim.lr"))


def test_a_used_run_directory_is_refused_with_the_ways_out(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = place / "runs" / "mine"
    used.mkdir(parents=True)
    (used / "metrics.jsonl").write_text('{"progress/step": 0}\n')
    ways = ("runs/mine", "run.name=", "run.if_exists=archive")
    assert cli.main(["train", "mine.yaml"]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ways)
    assert cli.main(["train", "mine.yaml", "--dry-run"]) == 0  # which needs no directory
    (note,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
    assert all(word in note for word in ("a run would be refused", *ways))
    assert (used / "metrics.jsonl").read_text() == '{"progress/step": 0}\n'


def test_int8_is_refused_where_it_has_no_kernel(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "detect", lambda wanted: Machine(Device.cuda, "a Blackwell GPU", 10.0))
    said = refused(capsys)
    assert all(word in said for word in ("quantization.format", "int8", "Blackwell", "fp8"))


def test_formats_by_machine() -> None:
    hopper, ada = Machine(Device.cuda, "H", 9.0), Machine(Device.cuda, "A", 8.0)

    def problem(form: Format, machine: Machine) -> str | None:
        return format_problem(form, machine.kind, machine.name, machine.capability)

    assert all(problem(form, hopper) is None for form in Format)
    assert problem(Format.int8, ada) is None
    assert "8.9" in str(problem(Format.fp8, ada))


def test_a_dry_run_says_the_plan_and_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(place.rglob("*"))
    assert cli.main(["train", "mine.yaml", "--dry-run", "run.name=other"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("runs/other", "TP2", "int8", "2 ranks", "nothing was written"))
    assert sorted(place.rglob("*")) == before


def test_a_grid_of_runs_names_the_tool_that_makes_them(capsys: pytest.CaptureFixture[str]) -> None:
    for path in [path for path in (ROOT / "recipes").glob("*.yaml") if "\naxes:" in path.read_text()]:
        for command in (["train", str(path)], ["train", str(path), "--dry-run"], ["plan", str(path)]):
            assert cli.main(command) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.endswith(
                f"`axes` make it a grid of runs, started by python tools/compare_corrections.py {path}"
            )


def test_print_config_is_a_recipe(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "mine.yaml", "--print-config"]) == 0
    printed = capsys.readouterr().out
    (place / "again.yaml").write_text(printed)
    assert cli.main(["train", "again.yaml", "--print-config"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("arguments", [["train", "mine.yaml", "--dryrun"], ["toy", "folder", "a=b", "--c"], []])
def test_unknown_arguments_are_refused(arguments: list[str], place: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_translate_prints_a_section_or_names_what_is_wrong(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "theirs.yaml").write_text("use_tis: true\ntis_imp_ratio_cap: 2.0\n")
    assert cli.main(["translate", "skyrl", "theirs.yaml"]) == 0
    (place / "ours.yaml").write_text(capsys.readouterr().out)
    assert load(place / "ours.yaml").correction.weight.high == 2.0
    assert cli.main(["translate", "skyrl", "nowhere.yaml"]) == 2
    assert cli.main(["translate", "skyr", "theirs.yaml"]) == 2
    said = capsys.readouterr().err
    assert "nowhere.yaml" in said
    assert "skyrl" in said


@pytest.mark.fault(
    "a job asks for another number of tasks than the recipe has ranks", "its check says so, before the ranks"
)
def test_the_number_of_tasks_is_checked(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    said = refused(capsys, "--dry-run", "--ranks", "slurm", "learner.tensor_parallel=2")
    assert "4 processes" in said
    assert "is 2" in said
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert cli.main(["train", "mine.yaml", "--dry-run", "--ranks", "slurm", "learner.tensor_parallel=2"]) == 0


@pytest.mark.fault("a reward reads a variable that it is not given", "a dry run finds it")
def test_a_reward_is_checked_with_what_it_will_see(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "judging.py").write_text(
        "import os\nKEY = os.environ['JUDGE_KEY']\ndef judge(row, key, text): return 1.0\n"
    )
    monkeypatch.setenv("JUDGE_KEY", "secret")
    words = ["--dry-run", "reward.name=judging:judge"]
    assert "KeyError: 'JUDGE_KEY'" in refused(capsys, *words)
    assert cli.main(["train", "mine.yaml", *words, "reward.environment=[JUDGE_KEY]"]) == 0
    assert "reward.environment: OTHER not set" in refused(capsys, *words, "reward.environment=[JUDGE_KEY, OTHER]")
