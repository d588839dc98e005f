"""`megatron-rl plan RECIPE`: what it says of ranks, memory, cache and time, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import APART, Command
from nvidia_smi import nvidia_smi

from megatron_rl import cli
from megatron_rl.config import load
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import GPUS, Machine, named
from megatron_rl.workshop.planner.case import Workload
from megatron_rl.workshop.planner.memory.engine import GIB
from megatron_rl.workshop.planner.plan import plan
from megatron_rl.workshop.planner.table import describe

ROOT = Path(__file__).parents[3]
DAPO = str(ROOT / "recipes" / "dapo_fp8.yaml")
NODE = ("--on", "1x8xH100")
WRONG = (
    "learner.tensor_parallel=3",
    "sampler.tensor_parallel=3",
    "loss.clip_high=-1",
    "optim.lr=0",
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
    assert learner["peak"] == pytest.approx(sum(learner["phases"][learner["peak_phase"]].values()))
    assert learner["limit"] - learner["peak"] == pytest.approx(learner["margin"])
    engine = memory(plan, "engine")["phases"]["rollout"]
    # made before vLLM looks at the memory that it takes a share of
    beside = engine.pop("engine: CUDA, NCCL")
    assert beside > 0
    assert sum(engine.values()) == pytest.approx(0.9 * learner["limit"])
    # keys and values of 36 layers, 2 of 8 heads of 128 on each GPU, in BF16
    assert plan["cache"]["tokens"] == int(engine["engine: cache"] / (2 * 36 * 2 * 128 * 2))
    assert plan["cache"]["at_limits"] == plan["cache"]["tokens"] // (2048 + 20480)
    assert plan["time"]["step"] == pytest.approx(
        sum(plan["time"][phase] for phase in ("rollout", "prox", "update", "sync", "save"))
    )
    assert plan["gpu_hours"] == pytest.approx(plan["time"]["step"] * 500 * 8 / 3600)
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


def test_the_host_s_memory_is_told_beside_what_the_machine_has() -> None:
    config = load(Path(DAPO))
    machine = named("1x8xH100")
    made = plan(config, read_card(str(config.model.folder)), machine)
    line = next(line for line in describe(config, made).splitlines() if line.startswith("host "))
    assert "(checkpoint, pinned 128.0, " in line
    assert line.endswith(" is not known")
    assert "this one has 503" in describe(
        config, replace(made, machine=replace(machine, host_gib=503.4))
    )


def test_what_is_split_shrinks(capsys: pytest.CaptureFixture[str]) -> None:
    two, four = (
        memory(
            planned(
                capsys, "learner.tensor_parallel=2", f"learner.data_parallel={dp}", status=status
            ),
            "learner",
        )
        for dp, status in ((1, 2), (2, 0))  # one replica alone is too much
    )
    static = ("weights", "gradients", "masters, moments")
    halves = [four["phases"]["save"][part] / two["phases"]["save"][part] for part in static]
    assert halves == pytest.approx([1, 1, 0.5], rel=0.01)


def test_recomputing_takes_less_memory_and_more_time(capsys: pytest.CaptureFixture[str]) -> None:
    packs = "learner.tokens_per_microbatch=24000"
    less = planned(capsys, packs)
    more = planned(capsys, packs, "learner.recompute=none")
    assert memory(less, "learner")["peak"] < memory(more, "learner")["peak"]
    assert less["time"]["update"] > more["time"]["update"]
    assert (less["verdict"], more["verdict"]) == ("fits", "tight")


def test_an_engine_that_sleeps_gives_its_cache_back(capsys: pytest.CaptureFixture[str]) -> None:
    together = ["sampler.devices='0,1,2,3'", "sampler.sleep=discard", "sync.transport=ipc"]
    shared = memory(
        planned(capsys, *together, "sampler.vllm.gpu_memory_utilization=0.4"), "learner and engine"
    )
    assert shared["gpus"] == 4
    assert "engine: cache" in shared["phases"]["rollout"]
    assert "engine: cache" not in shared["phases"]["update"]
    assert "engine: next weights" in shared["phases"]["sync"]
    # 0.9 beside what the learner keeps
    tall = memory(planned(capsys, *together, status=2), "learner and engine")
    assert tall["verdict"] == "does not fit"
    assert tall["peak_phase"] == "probe"  # what the learner keeps, and a forward pass


def test_what_does_not_fit_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", DAPO, "--on", "1x8xL4", *APART]) == 2
    said = capsys.readouterr()
    assert "a GPU of: learner (4)" in said.out  # the table is still there
    assert "memory: a GPU of " in said.err
    assert "--suggest" in said.err


def test_a_cache_that_holds_no_answer_is_refused(command: Command) -> None:
    words = ["model.path=models/Qwen3-32B", "sampler.tensor_parallel=1", "sampler.devices='7'"]
    said = command("plan", DAPO, *NODE, *words, "quantization=none", status=2)
    assert "sampler.vllm.gpu_memory_utilization: " in said


def test_five_mistakes_in_one_message(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "megatron_rl.cli",
        "plan",
        DAPO,
        *NODE,
        *WRONG,
        "reward.name=nowhere:nothing",
    ]
    env = {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=env
    )
    assert result.returncode == 2
    for key in (
        "learner.tensor_parallel",
        "sampler.tensor_parallel",
        "loss.clip_high",
        "optim.lr",
        "reward.name",
    ):
        assert f"error: {key}" in result.stderr, result.stderr
    assert "nearest valid" in result.stderr
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_sbatch_line(command: Command) -> None:
    servers = ("sampler.devices=null", "sampler.addresses=['http://127.0.0.1:8000']")
    words = ("--sbatch", "--on", "2x8xH100", *APART, "learner.data_parallel=4", *servers)
    line, *others = command("plan", DAPO, *words).splitlines()
    assert line.endswith(" slurm/dapo_fp8.sbatch")
    options = ("--nodes=2", "--ntasks-per-node=8", "--gres=gpu:8")
    assert all(word in line for word in (*options, "OVERRIDES=", "learner.data_parallel=4"))
    assert any("megatron-rl serve" in other for other in others)


def test_without_a_gpu_a_recipe_is_planned_for_its_own_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str, status: int = 0) -> str:
        assert cli.main(["plan", *words]) == status
        return "".join(capsys.readouterr())

    nvidia_smi(tmp_path, 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert said(DAPO) == said(DAPO, "--on", "own") == said(DAPO, *NODE)
    assert said(DAPO, "--sbatch") == said(DAPO, "--sbatch", *NODE)
    assert "--on own" in said(
        str(ROOT / "recipes" / "quickstart.yaml"), "run.device=cuda", status=2
    )


def test_assumptions_are_printed_and_can_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    short, long = (planned(capsys, "--assume", f"response={share}") for share in (0.1, 0.8))
    assert short["time"]["rollout"] < long["time"]["rollout"]
    assert short["assumed"]["response"] == 0.1
    for wrong in ("respons=0.1", "response=x", "response=0"):
        assert cli.main(["plan", DAPO, *NODE, "--assume", wrong]) == 2
        assert f"--assume {wrong}" in capsys.readouterr().err


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_is_known_by_its_name(name: str) -> None:
    assert named(f"1x8x{name}").gpu == GPUS[name]
    assert Machine(named("1x1xH100").kind, f"NVIDIA {name} 80GB HBM3").gpu == GPUS[name]


def test_the_limit_is_that_of_the_machine_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("quantization=int8", "learner.megatron.fp8=null", *APART)
    assert cli.main(["plan", DAPO, "--on", "1x8xA100-40", "--json", *words]) == 2
    assert memory(json.loads(capsys.readouterr().out), "learner")["limit"] == pytest.approx(
        40 * GIB, rel=0.02
    )


def test_a_node_s_own_memory_is_a_limit_where_it_is_named(command: Command) -> None:
    assert "this one has 1024" in command("plan", DAPO, "--on", "1x8xH100-80-1024")
    said = command("plan", DAPO, "--on", "1x8xH100-80-256", status=2)
    assert "host memory: " in said and "has 256" in said and "learner.offload" in said


TOOLS = str(ROOT / "recipes" / "dapo-qwen3_8b-1n8g-int8-tools.yaml")


def test_sessions_prefill_what_their_turns_add(command: Command) -> None:
    asked = ("--assume", "turns=3", "--assume", "response=0.1", "--assume", "observation=0.5")
    given = (
        "environment.observation_tokens=400",
        "rollout.max_response_tokens=1000",
        "rollout.max_prompt_tokens=400",
    )
    found = {}
    for kept in (True, False):
        more = (
            f"sampler.vllm.enable_prefix_caching={kept}".lower(),
            "rollout.max_context_tokens=22528",
        )
        said = command("plan", TOOLS, *NODE, "--json", *asked, *given, *more)
        found[kept] = json.loads(said)
    work = found[True]["work"]
    assert (work["turns"], work["sampled"], work["response"], work["prompt"]) == (3, 300, 700, 100)
    slower = found[False]["time"]["rollout"] - found[True]["time"]["rollout"]
    assert slower == pytest.approx(found[True]["time"]["cold"])
    assert slower > 1
    # turns of 100 sampled tokens, and 200 that are added behind the first two
    prefilled = Workload(1, 100.0, 700.0, 1000, 1, turns=3.0, sampled=300.0).prefilled
    assert (prefilled(True), prefilled(False)) == (200 + 200, (100 + 300) + (100 + 600))


def test_a_plan_without_sessions_has_no_word_of_them(command: Command) -> None:
    assert "sessions" not in command("plan", DAPO, *NODE, *APART)
    said = command("plan", TOOLS, *NODE, "environment.sessions=16")
    assert "16 open at once (environment.sessions)" in said
    assert "rollout: 16 sequences together" in said


def test_the_plan_says_what_tools_take(command: Command) -> None:
    """With all decodable sessions open, each waits for its own tools, one row after the other."""

    def times(sessions: int, tool_s: float) -> dict[str, float]:
        given = (f"environment.sessions={sessions}", "--assume", f"tool_s={tool_s}", "--json")
        said = command("plan", TOOLS, *NODE, "rollout.prompts_per_step=8", *given)
        return json.loads(said)["time"]

    all_open = times(128, 20)
    few = times(32, 20)
    short = times(32, 1)
    assert (all_open["decoded"], few["decoded"]) == (128, 32)
    assert [one["tools"] for one in (all_open, few, short)] == pytest.approx(
        [2 * 20, 4 * 2 * 20, 4 * 2]
    )
    assert few["rollout"] - short["rollout"] == pytest.approx(4 * 2 * 19)
    assert short["in_tools"] < few["in_tools"] < 32


def test_the_cache_of_open_sessions_is_told(command: Command) -> None:
    said = command("plan", TOOLS, *NODE, "--assume", "tool_s=20")
    assert "enable_prefix_caching" in said
    # 2,048 sessions, twice 20 s
    assert "tools work 22h45m" in said
    assert "open sessions " in said
    assert "prefixes are lost" not in said
    said = command("plan", TOOLS, *NODE, "environment.sessions=2048")
    (fitting,) = re.findall(
        r"prefixes are lost while tools work, and prefilled again; environment.sessions=(\d+)", said
    )
    said = command("plan", TOOLS, *NODE, f"environment.sessions={fitting}")
    assert "prefixes are lost" not in said


def test_what_an_edit_changes_is_in_the_plan(command: Command) -> None:
    said = command("plan", DAPO, *NODE, "loss.clip_low=3e-4", "checkpoint.best=eval/accuracy")
    assert "learner   fp8 (e4m3, blockwise)" in said
    assert "loss      ppo with clip 0.0003 " in said
    assert " the highest eval/accuracy\n" in said
    assert "changed   loss.clip_low 0.0003, was 0.2 " in said
    assert "note      loss.clip_low=0.0003 with loss.name=ppo" in said
    assert "conf/dapo.yaml" in said
