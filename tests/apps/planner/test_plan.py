"""`megatron-rl plan RECIPE`: ranks, memory, cache, time, and refusals."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import APART, Command
from nvidia_smi import nvidia_smi

from megatron_rl import cli
from megatron_rl.apps.planner.case import Workload
from megatron_rl.apps.planner.memory.engine import GIB

ROOT = Path(__file__).parents[3]
DAPO = str(ROOT / "recipes" / "dapo_fp8.yaml")
NODE = ("--on", "1x8xH100")
WRONG = (
    "learner.tensor_parallel=3",
    "sampler.tensor_parallel=3",
    "loss.clip_high=-1",
    "optim.lr=0",
    "rollout.temperature=9",
)


def planned(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert cli.main(["plan", DAPO, *NODE, "--json", *APART, *words]) == status
    return json.loads(capsys.readouterr().out)


def memory(plan: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(one for one in plan["memory"] if one["kind"] == kind)


def test_a_recipe_on_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys)
    assert plan["verdict"] == "fits"
    assert plan["roles"]["kinds"] == {"learner": 4, "engine": 4}
    learner = memory(plan, "learner")
    # 2 bytes of weights (and 2 of their FP8 copies), 4 of gradients, 12 of masters and moments, a
    # quarter each
    quarter = plan["parameters"] / 4
    update = learner["phases"]["update"]
    assert update["gradients"] == pytest.approx(4 * quarter, rel=0.01)
    assert update["masters, moments"] == pytest.approx(12 * quarter, rel=0.01)
    assert 2 * quarter < update["weights"] < 4 * quarter
    peak = learner["phases"][learner["peak_phase"]]
    assert learner["peak"] == pytest.approx(sum(peak.values()))
    assert learner["limit"] - learner["peak"] == pytest.approx(learner["margin"])
    engine = memory(plan, "engine")["phases"]["rollout"]
    # made before vLLM looks at the memory that it takes a share of
    beside = engine.pop("engine: CUDA, NCCL")
    assert beside > 0
    assert sum(engine.values()) == pytest.approx(0.9 * learner["limit"])
    # keys and values of 36 layers, 2 of 8 heads of 128 on each GPU, in BF16
    of_token = 2 * 36 * 2 * 128 * 2
    cache = plan["cache"]
    assert cache["tokens"] == int(engine["engine: cache"] / of_token)
    assert cache["at_limits"] == cache["tokens"] // (2048 + 20480)
    time = plan["time"]
    phases = ("rollout", "prox", "update", "sync", "save")
    assert time["step"] == pytest.approx(sum(time[phase] for phase in phases))
    assert plan["gpu_hours"] == pytest.approx(time["step"] * 500 * 8 / 3600)
    assert plan["sync"]["writers"] == 1


def test_a_checkpoint_s_pinned_memory_is_what_torch_rounds_it_up_to(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """26.7 GiB of a rank become 32, 13.4 of twice as many become 16."""
    plan = planned(capsys)
    assert 100 * GIB < plan["kept_gib"] * GIB < 110 * GIB
    assert plan["host"]["checkpoint, pinned"] == 128 * GIB
    # too much for the GPUs, as it is shared out there
    apart = planned(capsys, "learner.data_parallel=2", status=2)
    assert apart["host"]["checkpoint, pinned"] == 128 * GIB
    slept = planned(capsys, "sampler.sleep=offload", "sync.dir=/shared")["host"]
    assert "the sleeping engine's weights" in slept.keys() - plan["host"].keys()
    assert "sync, in shared memory" in plan["host"].keys() - slept.keys()


def test_recomputing_takes_less_memory_and_more_time(capsys: pytest.CaptureFixture[str]) -> None:
    packs = "learner.tokens_per_microbatch=24000"
    less = planned(capsys, packs)
    more = planned(capsys, packs, "learner.recompute=none")
    assert memory(less, "learner")["peak"] < memory(more, "learner")["peak"]
    assert less["time"]["update"] > more["time"]["update"]
    assert less["verdict"] == "fits"
    assert more["verdict"] == "tight"


def test_a_cache_that_holds_no_answer_is_refused(command: Command) -> None:
    words = ["model.path=models/Qwen3-32B", "sampler.tensor_parallel=1", "sampler.devices='7'"]
    said = command("plan", DAPO, *NODE, *words, "quantization=none", status=2)
    assert "sampler.vllm.gpu_memory_utilization: " in said


def test_five_mistakes_in_one_message(empty: Path, command: Command) -> None:
    said = command("plan", DAPO, *NODE, *WRONG, status=2)
    for override in WRONG:
        assert f"error: {override.partition('=')[0]}" in said
    assert "nearest valid" in said
    assert list(empty.iterdir()) == []


def test_the_sbatch_line(command: Command) -> None:
    servers = ("sampler.devices=null", "sampler.addresses=['http://127.0.0.1:8000']")
    words = ("--sbatch", "--on", "2x8xH100", *APART, "learner.data_parallel=4", *servers)
    line, *others = command("plan", DAPO, *words).splitlines()
    assert line.endswith(" slurm/dapo_fp8.sbatch")
    short = command("plan", DAPO, *words, "run.steps=1", "eval.every=0")
    assert re.search(r"--time=01:(00|15|30|45):00", short)  # with the start, at least an hour
    options = ("--nodes=2", "--ntasks-per-node=8", "--gres=gpu:8")
    for word in (*options, "OVERRIDES=", "learner.data_parallel=4"):
        assert word in line
    assert "megatron-rl serve" in "".join(others)


def test_without_a_gpu_a_recipe_is_planned_for_its_own_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str, status: int = 0) -> str:
        assert cli.main(["plan", *words]) == status
        return "".join(capsys.readouterr())

    nvidia_smi(tmp_path, 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    on_node = said(DAPO, *NODE)
    assert said(DAPO) == on_node
    assert "sampler   1 engine with 8 GPUs each" in on_node
    assert re.search(r"sync \d\.\ds", on_node)
    assert said(DAPO, "--on", "own") == on_node
    assert said(DAPO, "--sbatch") == said(DAPO, "--sbatch", *NODE)
    quickstart = str(ROOT / "recipes" / "quickstart.yaml")
    assert "--on own" in said(quickstart, "run.device=cuda", status=2)


def test_assumptions_are_printed_and_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    short = planned(capsys, "--assume", "response=0.1")
    long = planned(capsys, "--assume", "response=0.8")
    assert short["time"]["rollout"] < long["time"]["rollout"]
    assert short["assumed"]["response"] == 0.1
    for wrong in ("respons=0.1", "response=x", "response=0"):
        assert cli.main(["plan", DAPO, *NODE, "--assume", wrong]) == 2
        assert f"--assume {wrong}" in capsys.readouterr().err


TOOLS = str(ROOT / "recipes" / "dapo-qwen3_8b-1n8g-int8-tools.yaml")


def test_the_plan_says_what_tools_take(command: Command) -> None:
    """With all decodable sessions open, each waits for its own tools, one row after the other."""

    def times(sessions: int, tool_s: float) -> dict[str, float]:
        given = (f"environment.max_concurrent={sessions}", "--assume", f"tool_s={tool_s}", "--json")
        said = command("plan", TOOLS, *NODE, "rollout.prompts_per_step=8", *given)
        return json.loads(said)["time"]

    all_open = times(128, 20)
    few = times(32, 20)
    short = times(32, 1)
    assert all_open["decoded"] == 128
    assert few["decoded"] == 32
    assert all_open["tools"] == pytest.approx(2 * 20)
    assert few["tools"] == pytest.approx(4 * 2 * 20)
    assert short["tools"] == pytest.approx(4 * 2)
    assert few["rollout"] - short["rollout"] == pytest.approx(4 * 2 * 19)


def test_a_node_s_own_memory_is_a_limit_where_it_is_named(command: Command) -> None:
    assert "it has: not known" in command("plan", DAPO, *NODE)
    assert "it has: 1024" in command("plan", DAPO, "--on", "1x8xH100-80-1024")
    said = command("plan", DAPO, "--on", "1x8xH100-80-256", status=2)
    assert "CPU memory: " in said
    assert "learner.offload" in said


def test_top_logprobs_take_six_bytes_each(capsys: pytest.CaptureFixture[str]) -> None:
    plain = planned(capsys)["host"]
    top = planned(capsys, "rollout.top_logprobs.max=32")["host"]
    tokens = 128 * 16 * 0.4 * 20480  # mean length of a response: 0.4 of the limit
    # responses and batch of the driver, and the batch of each of four ranks
    assert top["top logprobs"] == pytest.approx(tokens * (2 + 6 * 32) * (2 + 4))
    assert "top logprobs" not in plain
    assert cli.main(["plan", DAPO, *NODE, *APART, "rollout.top_logprobs.max=32"]) == 0
    assert "top       32 logprobs a token" in capsys.readouterr().out


def test_sessions_prefill_what_their_turns_add(command: Command) -> None:
    asked = ("--assume", "turns=3", "--assume", "response=0.1", "--assume", "observation=0.5")
    given = (
        "environment.max_observation_tokens=400",
        "rollout.max_response_tokens=1000",
        "rollout.max_prompt_tokens=400",
        "rollout.max_context_tokens=22528",
    )
    found = {}
    for kept in ("true", "false"):
        more = f"sampler.vllm.enable_prefix_caching={kept}"
        found[kept] = json.loads(
            command(
                "plan",
                TOOLS,
                *NODE,
                "--json",
                *asked,
                *given,
                more,
            )
        )
    work = found["true"]["work"]
    assert work["turns"] == 3
    assert work["sampled"] == 300
    assert work["response"] == 700
    assert work["prompt"] == 100
    rollouts = {kept: made["time"]["rollout"] for kept, made in found.items()}
    assert rollouts["false"] > rollouts["true"] + 1
    # turns of 100 sampled tokens, and 200 that are added behind the first two
    prefilled = Workload(1, 100.0, 700.0, 1000, 1, turns=3.0, sampled=300.0).prefilled
    assert prefilled(True) == 200 + 200
    assert prefilled(False) == (100 + 300) + (100 + 600)


def test_open_sessions_beyond_the_cache_are_noted(command: Command) -> None:
    def fitting(*words: str) -> list[str]:
        said = command("plan", TOOLS, *NODE, "--assume", "tool_s=20", *words)
        return re.findall(r"^note .*environment\.max_concurrent=(\d+) fits$", said, re.M)

    assert "sessions " not in command("plan", DAPO, *NODE, *APART)
    assert fitting() == []
    (sessions,) = fitting("environment.max_concurrent=2048")
    assert fitting(f"environment.max_concurrent={sessions}") == []


def test_edits_are_in_the_plan(command: Command) -> None:
    said = command("plan", DAPO, *NODE, "loss.clip_low=3e-4")
    rows = dict(line.split(maxsplit=1) for line in said.splitlines() if " " in line.strip())
    assert "clip_low=0.0003" in rows["loss"]
    assert rows["from"].startswith("base loss.clip_low 0.0003")
