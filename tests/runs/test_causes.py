"""Why a run ended: each class from what is really printed, no guess where nothing is known, advice
to be followed.

`last_words.txt` holds what torch, vLLM, Slurm and this project print: blocks of a class and a text.
"""

import errno
import importlib.util
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.checkpoint.checkpoints import TornCheckpoint, read
from megatron_rl.config import ConfigError, all_keys, from_mapping, load
from megatron_rl.config.foreign import fields_of
from megatron_rl.config.schema import Config, Format, RewardSection
from megatron_rl.processes.process import describe_end
from megatron_rl.rewards.pool import TOO_LATE, WATCHED, RewardsHang, _Breaker
from megatron_rl.rollout.collect import RewardError
from megatron_rl.runs.alarms import RULES
from megatron_rl.runs.causes import ENGINE, OUT_OF_MEMORY, ROWS, STUCK, UNKNOWN, Cause, explain
from megatron_rl.runs.disk import RecordLost, lasting
from megatron_rl.sampler.replica import NoServerLeft
from megatron_rl.weight_sync import probe

ROOT = Path(__file__).parents[2]
ENDED = (
    "SamplerError: the sampler's process ended during `generate` (exit status -9): "
    "ended by SIGKILL (out of memory?)"
)
LOG = "The end of runs/a/logs/attempt_1/sampler.log:\n"
PRINTED = [
    block.partition("\n")[::2]
    for block in (ROOT / "tests/runs/last_words.txt").read_text().split("\n\n")
]


@pytest.mark.parametrize(("name", "reason"), PRINTED)
def test_each_class_from_what_is_printed(name: str, reason: str) -> None:
    assert explain(reason.strip()).name == name


def test_how_processes_end() -> None:
    ends = {
        9: "dead_process",
        11: "crash",
        4: "crash",
        6: "crash",
        7: "shared_memory",
        15: "signal",
    }
    assert {number: explain(describe_end(-number)).name for number in ends} == ends
    assert explain(describe_end(1)).name == explain("").name == "unknown"


def test_every_class_is_met() -> None:
    met = {name for name, _ in PRINTED} | {name for name, _ in raised(Path("nowhere"))}
    assert met == {row.name for row in ROWS} | {"unknown"}


def test_the_page_lists_every_class() -> None:
    page = (ROOT / "docs" / "survival.md").read_text()
    assert all(f"| `{row.name}` | {row.what} |\n" in page for row in (*ROWS, UNKNOWN))


def raised(folder: Path) -> list[tuple[str, BaseException]]:
    """Errors as the code makes them."""

    def of(call, *arguments):
        try:
            call(*arguments)
        except Exception as error:
            return error
        raise AssertionError(f"{call} raised nothing")

    def late() -> None:
        breaker = _Breaker(RewardSection(name="mine:f"))
        for _ in range(WATCHED):
            breaker.note(True)

    def write(number: int) -> None:
        with lasting(folder / "metrics.jsonl"):
            raise OSError(number, os.strerror(number))

    zeros_BT = torch.zeros(4, 8)
    ones_BT = torch.ones(4, 8)
    check = (
        probe.check,
        zeros_BT,
        ones_BT,
        ones_BT.bool(),
        Format.int8,
        probe.Probe(3, 100, False),
    )
    assert TOO_LATE <= WATCHED
    return [
        ("host_memory", of(torch.empty, 1 << 50)),
        ("host_memory", of(bytearray, 1 << 60)),
        ("reward_hangs", of(late)),
        ("probe", of(*check)),
        ("disk_full", of(write, errno.ENOSPC)),
        ("run_directory", of(write, errno.ENOENT)),
        ("checkpoint", of(read, folder / "step_1")),
        (
            "data",
            of(load, ROOT / "recipes" / "quickstart.yaml", ["data.prompt_key=3", "data.train=[]"]),
        ),
        ("configuration", of(from_mapping, {"optim": {"lr": "fast"}})),
        ("unknown", NoServerLeftLess()),
    ]


class NoServerLeftLess(RuntimeError):
    """Its name only begins like one of the table's."""


def test_each_class_from_what_is_raised(tmp_path: Path) -> None:
    for name, error in raised(tmp_path):
        assert explain(f"{type(error).__name__}: {error}").name == name, error
    kinds = {type(error) for _, error in raised(tmp_path)}
    assert kinds >= {RewardsHang, probe.SyncMismatch, RecordLost, TornCheckpoint, ConfigError}
    assert RewardError.__name__ == "RewardError"


def test_a_fleet_s_general_advice_is_no_evidence() -> None:
    """Its error always speaks of memory."""
    error = NoServerLeft([], 3, 600.0)
    assert "memory ran out" in str(error)
    assert explain(f"NoServerLeft: {error}").name == "engine"


def test_the_words_are_still_in_vllm_s_source() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "v1"
    source = "".join(
        (folder / name).read_text() for name in ("core/kv_cache_utils.py", "worker/utils.py")
    )
    for words in (
        "No available memory for the cache blocks",
        "Free memory on device",
        "cache is needed",
    ):
        assert words in source
    assert (
        "died unexpectedly (exit code:"
        in (folder / "executor" / "multiproc_executor.py").read_text()
    )


def test_whose_word_it_is() -> None:
    own = explain("ValueError: x", process="rank 1", phase="update", log="rank_1.log")
    assert (own.process, own.phase, own.log) == ("rank 1", "update", "rank_1.log")
    engine = explain(
        f"{ENDED}. {LOG}last words", process="rank 0", phase="rollout", log="rank_0.log"
    )
    assert (engine.process, engine.log) == (ENGINE, "runs/a/logs/attempt_1/sampler.log")
    assert engine.paragraph().startswith(
        f"why: a process was killed (dead_process): {ENGINE}, in rollout. "
    )
    assert engine.paragraph().endswith("Its log is runs/a/logs/attempt_1/sampler.log.")
    assert Cause.read(engine.as_fields()) == engine
    assert Cause.read(None) is None
    assert Cause.read({"class": [], "advice": {}}) is not None  # of somebody else's status.json


def test_sigkill_is_no_memory_unless_the_kernel_has_counted_it() -> None:
    assert explain(ENDED).name == "dead_process"
    assert explain(ENDED, out_of_memory=True).name == OUT_OF_MEMORY.name
    assert explain("ValueError: x", out_of_memory=True).name == "unknown"


def test_a_stuck_process_is_the_cause_of_what_follows_from_it() -> None:
    stuck = {"process": "rank 1", "pid": 7, "phase": "sync", "seconds": 61.0}
    found = explain("rank 1 has not gone on", process="rank 0", stuck=stuck)
    assert (found.name, found.process, found.phase) == (STUCK.name, "rank 1", "sync")
    for follows in (
        describe_end(-9),
        "RuntimeError: Connection closed by peer",
        "SamplerError: it is gone",
        "",
    ):
        assert (explain(follows, stuck=stuck).name, explain(follows, stuck=stuck).process) == (
            "stuck_process",
            "rank 1",
        )
    assert explain("OSError: [Errno 28] No space left on device", stuck=stuck).name == "disk_full"
    assert explain("x", stuck=["of somebody else's status.json"]).name == "unknown"


@given(st.text(max_size=200))
def test_nothing_fails_on_any_text(text: str) -> None:
    assert explain(text, process=text, phase=text, log=text, stuck=text).paragraph()


# advice that can be followed

ADVICE = [
    *((row.name, row.advice) for row in (*ROWS, UNKNOWN)),
    *((alarm, rule.action) for alarm, rule in RULES.items()),
]
SECTIONS = "|".join(field.name for field in fields(Config))
MEGATRON = {
    "learner.megatron": ("transformer/transformer_config.py", "model_parallel_config.py"),
    "optim.megatron": (
        "optimizer/optimizer_config.py",
        "distributed/distributed_data_parallel_config.py",
    ),
}


def passed_through(key: str) -> bool:
    section, _, name = key.rpartition(".")
    if section == "sampler.vllm":
        return name in (fields_of("vllm", ("engine/arg_utils.py",), ("EngineArgs",)) or {})
    classes = (
        "TransformerConfig",
        "ModelParallelConfig",
        "OptimizerConfig",
        "DistributedDataParallelConfig",
    )
    return section in MEGATRON and name in (
        fields_of("megatron.core", MEGATRON[section], classes) or {}
    )


@pytest.mark.parametrize(("name", "advice"), ADVICE)
def test_advice_names_keys_that_exist(name: str, advice: str) -> None:
    for key in re.findall(rf"(?<![\w/.])(?:{SECTIONS})\.\w+(?:\.\w+)*", advice):
        assert (
            key in all_keys()
            or key + "." in "".join(f"{one}." for one in all_keys())
            or passed_through(key)
        ), key
    for setting in re.findall(rf"(?<![\w/.])(?:{SECTIONS})(?:\.\w+)*=\w+", advice):
        load(ROOT / "recipes" / "quickstart.yaml", [setting])
    for command in re.findall(r"`megatron-rl ([\w-]+)", advice):
        assert any(
            f'"{command}"' in path.read_text()
            for path in (ROOT / "megatron_rl").glob("**/commands/*.py")
        )


def test_an_advice_that_names_nothing_would_be_found() -> None:
    with pytest.raises(AssertionError):
        test_advice_names_keys_that_exist("x", "Lower learner.tokens_per_batch.")
    with pytest.raises(ConfigError):
        test_advice_names_keys_that_exist("x", "Set sampler.sleep=deep.")
