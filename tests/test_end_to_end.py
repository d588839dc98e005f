"""Training from a recipe on two ranks with a quantized engine, and a stop at any moment."""

import gzip
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from helpers import typed, wait_for
from preloaded import said

from megatron_rl.apps.quickstart import write_experts
from megatron_rl.data.toy import write_reasoning, write_toy
from megatron_rl.tracking.metrics_file import decode_line
from megatron_rl.tracking.rollout_file import read_rollouts

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
ROOT = Path(__file__).parent.parent
BOUND_S = 400
SMALL = (
    "run.steps=2",
    "rollout.prompts_per_step=16",
    "rollout.max_gen_batches=1",
    "eval.max_prompts=16",
)
COMMAND = [sys.executable, "-m", "megatron_rl.cli", "train"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("end_to_end")
    write_toy(folder / "data" / "toy")
    return folder


def train(place: Path, recipe: str, *overrides: str, fresh: bool = True) -> str:
    """`fresh`: from interpreters of its own, as a user starts it; else from forks that have their
    imports.
    """
    command = [*COMMAND, str(ROOT / "recipes" / recipe), *overrides]
    return typed(place, shlex.join(command)) if fresh else said("torch", command[1:], cwd=place)


def metrics(place: Path, run: str) -> list[dict[str, float]]:
    return [
        decode_line(line)
        for line in (place / "runs" / run / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def warm_start(place: Path) -> Path:
    settings = ["run.steps=10", "eval.max_prompts=16", "rollout.prompts_per_step=64"]
    train(place, "toy_sft.yaml", *settings, fresh=False)
    return place


def test_the_warm_start_learns_and_leaves_a_model(warm_start: Path) -> None:
    lines = metrics(warm_start, "toy_sft")
    assert [line["progress/step"] for line in lines] == list(range(11))
    assert lines[-1]["loss/total"] < 0.9 * lines[1]["loss/total"]
    model = warm_start / "runs" / "toy_sft" / "model"
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= {
        path.name for path in model.iterdir()
    }
    files = [
        path for path in model.parent.rglob("*") if path.is_file() and path.name != "owner.lock"
    ]
    assert {path.stat().st_mode for path in files} == {
        (model.parent / "config.yaml").stat().st_mode
    }


def test_a_real_task_with_a_chat_template(tmp_path: Path) -> None:
    write_reasoning(tmp_path / "data" / "reasoning")
    small = [
        "run.steps=1",
        "rollout.prompts_per_step=8",
        "rollout.max_gen_batches=1",
        "eval.max_prompts=8",
    ]
    random = ["model.path=data/reasoning/model", "model.init=random", "log.record_every=1"]
    train(tmp_path, "reasoning.yaml", *small, *random, fresh=False)
    rows = read_rollouts(
        tmp_path / "runs" / "reasoning" / "rollouts" / "step_1.parquet"
    ).to_pylist()
    assert len(rows) == 64
    assert all(row["verdict"] and "arithmetic problem" in row["prompt"] for row in rows)
    assert "chat_template" in (tmp_path / "runs/reasoning/model/tokenizer_config.json").read_text()


@pytest.mark.parametrize(
    "recipe",
    ["quickstart", "quickstart_pp2", "quickstart_bf16", "quickstart_fp8", "quickstart_lora"],
)
def test_reinforcement_learning_from_it(warm_start: Path, recipe: str) -> None:
    more = (
        ["quantization.smoothing=0.5", "log.profile_steps=[2]"]
        if recipe == "quickstart_pp2"
        else []
    )
    settings = [*SMALL, *more, "log.record_every=1", "sync.probe_every=1"]
    screen = train(warm_start, f"{recipe}.yaml", *settings, fresh=recipe == "quickstart")
    folder = warm_start / "runs" / recipe
    lines = metrics(warm_start, recipe)
    assert [line["progress/step"] for line in lines] == [0, 1, 2]
    assert all(line["sync/probe_abs_diff"] <= line["sync/probe_budget"] for line in lines)
    assert all("eval/accuracy" in line for line in (lines[0], lines[-1]))
    status = json.loads((folder / "status.json").read_text())
    assert (status["state"], status["unknown_metrics"]) == ("finished", [])
    table = read_rollouts(folder / "rollouts" / "step_2.parquet")
    assert table.num_rows == lines[-1]["rollout/n_trained"]
    assert table.column("prox_logprobs").null_count == 0
    assert (folder / "report.html").stat().st_size > 50_000
    assert len(screen.splitlines()) < 40  # a person reads this
    traces = sorted((folder / "dumps").glob("*/*"))
    assert {trace.name.partition("_pass_")[0] for trace in traces} == (
        {"rank_0", "rank_1"} if len(more) > 1 else set()
    )
    if traces:
        assert {"rank_1_pass_1_forward.json.gz", "rank_1_pass_2_update.json.gz"} < {
            trace.name for trace in traces
        }
        events = json.loads(gzip.decompress(traces[-1].read_bytes()))["traceEvents"]
        assert any("Backward" in event["name"] for event in events)


IN_FLIGHT = ("rollout.max_staleness=1", "rollout.in_flight=interrupt", "rollout.max_gen_batches=2")
SHARED = ("learner.tensor_parallel=2", "learner.megatron.sequence_parallel=true")
ROUTED = {
    "two engines and updates in mid-answer": ["sampler.engines=2", *IN_FLIGHT],
    "two formats": ["sampler.engines=2", "sampler.formats=[int8, none]"],
    "an engine of two ranks": [
        "sampler.tensor_parallel=2",
        "learner.data_parallel=2",
        "learner.expert_parallel=2",
    ],
    "short prefills": [
        "sampler.vllm={max_num_seqs: 32, max_num_batched_tokens: 44}",
        "learner.tokens_per_microbatch=512",
        "learner.forward=as_sampler",
        *SHARED,
    ],
}


@pytest.mark.parametrize("case", ROUTED)
def test_every_token_goes_to_the_experts_that_were_chosen_for_it(place: Path, case: str) -> None:
    folder = place / "data" / "experts"
    if not folder.exists():
        write_experts(folder)
    name = case.replace(" ", "_").replace("'", "")
    random = ["model.path=data/experts/model", "model.init=random"]
    train(
        place,
        "experts.yaml",
        *SMALL,
        *random,
        f"run.name={name}",
        "eval.every=0",
        *ROUTED[case],
        fresh=False,
    )
    lines = metrics(place, name)[1:]
    assert [line["router/replayed"] for line in lines] == [1.0, 1.0]
    assert {line[f"router/replayed/layer_{layer}"] for line in lines for layer in range(2)} == {1.0}
    if "learner.forward=as_sampler" in ROUTED[case]:
        assert lines[0]["rollout_corr/k3_kl"] < 1e-6, "no less than INT8's own"


def test_a_learner_that_computes_as_the_sampler(warm_start: Path) -> None:
    """Close where rounding is known to the last step (docs/concepts/precision.md), else bounded."""
    run = ["run.name=one_arithmetic", "learner.forward=as_sampler", "quantization.smoothing=0.5"]
    train(warm_start, "quickstart.yaml", *SMALL, *run, fresh=False)
    known = not torch.cpu._is_avx512_supported()
    lines = metrics(warm_start, "one_arithmetic")[1:]
    assert [
        line["rollout_corr/logp_abs_diff_mean"] < (1e-3 if known else 0.05) for line in lines
    ] == [True, True]


@pytest.fixture
def endless(warm_start: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    settings = [
        "run.name=endless",
        "run.steps=100000",
        "rollout.prompts_per_step=16",
        "eval.max_prompts=16",
    ]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        [*COMMAND, recipe, *settings],
        cwd=warm_start,
        text=True,
        **streams,
    )
    yield process, warm_start / "runs" / "endless"
    if process.poll() is None:
        process.kill()
        process.wait()


def test_ctrl_c_leaves_no_process_and_a_consistent_directory(
    endless: tuple[subprocess.Popen[str], Path],
) -> None:
    """Other signals, and kills: tests/faults/test_asked_to_stop.py and test_kill.py."""
    process, run = endless
    log = run / "metrics.jsonl"
    wait_for(
        lambda: process.poll() is not None or (log.exists() and log.read_text().count("\n") >= 3),
        "step",
    )
    assert process.poll() is None, process.stdout.read() if process.stdout else ""
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 4  # two ranks, the engine, a reward worker
    os.kill(process.pid, signal.SIGINT)
    process.wait(timeout=BOUND_S)  # a step is finished and kept before the end
    wait_for(
        lambda: not any(child.is_running() and child.status() != "zombie" for child in children),
        "end of all",
        30,
    )
    lines = [decode_line(line) for line in log.read_text().splitlines()]
    assert [line["progress/step"] for line in lines] == list(range(len(lines)))
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    screen = process.stdout.read() if process.stdout else ""
    assert "metrics.jsonl" in screen
    assert "Traceback" not in screen
    assert "resume" not in screen
