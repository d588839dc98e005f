"""A whole GRPO step against TRL's, on the same model, prompts and lengths, in turn; and where ours
spends its time.

    python tools/bench/step.py [--shape toy] [--shape large] [--rounds 5] [--ranks 2]
    [--tensor-parallel 1]
        [--engines 1] [--precision bf16]

Ours is a run as `megatron-rl train` starts it, BF16 learner and INT8 sampler, whose loop waits for
its turn between two steps; on a host without BF16 instructions with the engines and the precision
that the quickstart takes there. TRL (1.16) is put into build/trl where it is missing, with what it
needs beside this project's packages; the project never imports it. Of three precisions it takes the
one that is fastest here. Answers have full length: no token of the model ends one. Both sides have
every core.

The floor of a phase is the time of its products with weights, at the speed of one large product of
the same kind on as many cores; of a sync, a plain copy of the bytes that it sends. Attention's own
products (6 % of the toy's, 1 % of the large model's) are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from megatron_rl import rank, train
from megatron_rl.config import from_mapping, to_yaml
from megatron_rl.config.schema import IfExists
from megatron_rl.data.toy import save_tokenizer
from megatron_rl.processes import instructions
from megatron_rl.supervision import launch
from megatron_rl.tracking.progress import Progress
from megatron_rl.tracking.run_dir import RunDir, open_run

HERE = Path(__file__).resolve().parent
BESIDE = HERE.parents[1] / "build" / "trl"
PACKAGES = (
    "trl==1.16.0",
    "accelerate==1.15.0",
    "datasets==5.2.0",
    "multiprocess==0.70.19",
    "pandas==3.1.1",
)
PRECISIONS = ("float32", "autocast", "bfloat16")
WARM_UP = 2
# of the environment: phases take seconds of processors, not of the clock
PROCESSOR = "BENCH_PROCESSOR_TIME"
NEVER = 1 << 20  # a token that no model here has
PHASES = ("rollout", "prox", "correction", "update", "sync", "other")


@dataclass(frozen=True)
class StepWorkload:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    prompts: int
    samples: int
    prompt_tokens: int = 16
    response_tokens: int = 32
    ends: bool = False  # true if a stop token can end a response

    @property
    def layer_weights(self) -> int:
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def answers(self) -> int:
        return self.prompts * self.samples

    @property
    def responses(self) -> int:
        return self.answers * self.response_tokens

    @property
    def tokens(self) -> int:
        return self.responses + self.answers * self.prompt_tokens


SHAPES = {
    "toy": StepWorkload(128, 4, 4, 2, 32, 384, 64, prompts=16, samples=8),
    "large": StepWorkload(640, 12, 10, 2, 64, 2560, 5120, prompts=8, samples=8),
}


@dataclass(frozen=True)
class StepLayout:
    """Precision of the learner, and how many engines sample."""

    ranks: int
    tensor_parallel: int
    engines: int
    precision: str = "bf16"


@dataclass(frozen=True)
class Machine:
    """The machine at best, with all of its cores."""

    bf16: float  # operations per second
    int8: float
    copy: float  # bytes per second

    @classmethod
    def measured(cls) -> Machine:
        size = 2048
        left, right = torch.randn(2, size, size).bfloat16()
        codes = torch.randint(-127, 128, (size, size), dtype=torch.int8)
        source, target = torch.ones(2, 1 << 27, dtype=torch.uint8)
        return cls(
            bf16=2 * size**3 / best(lambda: left @ right),
            int8=2 * size**3 / best(lambda: torch._int_mm(codes, codes)),
            copy=source.nbytes / best(lambda: target.copy_(source)),
        )


def floors(work: StepWorkload, machine: Machine, sent_bytes: float) -> dict[str, float]:
    """Seconds by phase. The last token of a response is sampled, and not read by the sampler."""
    forward = 2 * work.layer_weights * work.tokens + 2 * work.head_weights * work.responses
    sampled = 2 * work.layer_weights * (work.tokens - work.answers) / machine.int8
    return {
        "rollout": sampled + 2 * work.head_weights * work.responses / machine.bf16,
        "prox": forward / machine.bf16,
        "update": 3 * forward / machine.bf16,
        "sync": sent_bytes / machine.copy,
    }


def best(work: Callable[[], object], times: int = 7) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def write_model(folder: Path, work: StepWorkload) -> Path:
    """Random weights, and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM

    words = {f"t{number}": number for number in range(work.vocab)} | {"<never>": NEVER}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = 1 if work.ends else NEVER
    save_tokenizer(tokenizer, folder, pad_token="t0", eos_token="t1" if work.ends else "<never>")
    shape = {
        "model_type": "qwen3",
        "vocab_size": work.vocab,
        "hidden_size": work.hidden,
        "num_hidden_layers": work.layers,
        "num_attention_heads": work.heads,
        "num_key_value_heads": work.kv_heads,
        "head_dim": work.head_dim,
        "intermediate_size": work.ffn,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": end,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**shape), dtype=torch.bfloat16
    ).save_pretrained(folder)
    config = shape | {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    # vLLM refuses to wait for NEVER
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1] if work.ends else []})
    )
    return folder


def texts(work: StepWorkload) -> list[str]:
    """Four steps' prompts: both sides go round."""
    count = 4 * work.prompts
    size = work.vocab
    return [
        " ".join(f"t{(7 * row + 3 * at) % size}" for at in range(work.prompt_tokens))
        for row in range(count)
    ]


# our side


def recipe(
    work: StepWorkload, folder: Path, model: Path, layout: StepLayout, format: str = "int8"
) -> dict[str, Any]:
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in texts(work))
    )
    return {
        "run": {
            "name": "ours",
            "root": str(folder),
            "steps": 1 << 20,
            "hang_timeout_s": 3600.0,
        },
        "model": {"path": str(model)},
        "data": {"train": str(folder / "train.jsonl")},
        "rollout": {
            "prompts_per_step": work.prompts,
            "samples_per_prompt": work.samples,
            "max_prompt_tokens": work.prompt_tokens,
            "max_response_tokens": work.response_tokens,
            "dynamic_sampling": False,
        },
        "sampler": {
            "vllm": {"max_num_seqs": work.answers},
            "engines": layout.engines,
        },
        "quantization": {"format": format},
        "reward": {"name": f"{HERE / 'step_trl.py'}:varied"},
        "optim": {"lr": 1e-6},
        "learner": {
            "precision": layout.precision,
            "tensor_parallel": layout.tensor_parallel,
            "data_parallel": layout.ranks // layout.tensor_parallel,
        },
        "sync": {"probe_every": 0},
        "eval": {"every": 0},
        "checkpoint": {"every": 0},
        "log": {"record_every": 0},
    }


def loop_in_turn(
    config: Any,
    driver: Any,
    learner: Any,
    sync: Any,
    saver: Any,
    at: Progress,
    asked: Any = sys.stdin,
) -> None:
    """As train.loop, a step for each line of the input."""
    about = config, driver, learner, sync, saver
    at, _ = train.sync_and_log(at, *about, first=True)
    while learner.broadcast(bool(asked.readline()) if learner.is_driver else None):
        if PROCESSOR in os.environ:
            time.perf_counter = processor_clock()  # type: ignore[assignment]
        start = time.perf_counter()
        at = train.train_step(at, config, driver, learner)
        at, _ = train.sync_and_log(at, *about)
        if learner.is_driver:
            print(
                "seconds",
                json.dumps({"step": time.perf_counter() - start}),
                flush=True,
            )
    saver.close()


def processor_clock() -> Callable[[], float]:
    """Seconds of processors that this process and those below it have taken: others on the machine
    do not count.
    """
    # CPUCLOCK_SCHED of each
    clocks = [(~child.pid << 3) | 2 for child in psutil.Process().children(recursive=True)]
    return lambda: time.process_time() + sum(map(time.clock_gettime, clocks))


def be_rank(run_dir: Path) -> None:
    train.loop = loop_in_turn  # type: ignore[assignment]
    rank.main(run_dir, os.getppid())


class Side:
    """Process that takes a step on request."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.taken: list[dict[str, float]] = []

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        for line in self._process.stdout:
            if line.startswith("seconds "):
                self.taken.append(json.loads(line.removeprefix("seconds ")))
                return self.taken[-1]
        raise RuntimeError(f"it ended:\n{self._log.read_text()[-4000:]}")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def ours(
    work: StepWorkload, folder: Path, model: Path, layout: StepLayout, format: str = "int8"
) -> Iterator[tuple[Side, RunDir]]:
    config = from_mapping(recipe(work, folder, model, layout, format))
    run, _ = open_run(folder / "ours", IfExists.refuse, to_yaml(config))
    store = folder / "store"
    log = folder / "ours.log"
    processes = []
    assert run.lock is not None
    for number in range(layout.ranks):
        with log.open("a") as errors:
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--rank-of", str(run.path)],
                    env={**os.environ, **launch.rank_environment(number, layout.ranks, store)},
                    stdin=subprocess.DEVNULL if number else subprocess.PIPE,
                    stdout=errors if number else subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    pass_fds=[run.lock.fileno()],
                )
            )
    side = Side(processes[0], log)
    try:
        yield side, run
    finally:
        side.end()
        for process in processes[1:]:
            process.wait(timeout=60)


# TRL's side


def install_trl() -> None:
    if (BESIDE / "trl").is_dir():
        return
    uv = Path(sys.executable).with_name("uv")
    command = [
        str(uv),
        "pip",
        "install",
        "--python",
        sys.executable,
        "--target",
        str(BESIDE),
        "--no-deps",
        *PACKAGES,
    ]
    subprocess.run(command, check=True)


def start_trl(work: StepWorkload, folder: Path, model: Path, precision: str, threads: int) -> Side:
    asked = {
        "folder": str(folder / precision),
        "model": str(model),
        "texts": texts(work),
        "prompts": work.prompts,
        "samples": work.samples,
        "response_tokens": work.response_tokens,
        "precision": precision,
        "threads": threads,
    }
    log = folder / f"trl_{precision}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "step_trl.py"), json.dumps(asked)],
            env={
                **os.environ,
                "PYTHONPATH": str(BESIDE),
                "HF_HUB_OFFLINE": "1",
                "TRL_EXPERIMENTAL_SILENCE": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    return Side(process, log)


def fastest_trl(work: StepWorkload, folder: Path, model: Path, threads: int) -> tuple[str, Side]:
    """The others end."""
    sides = {
        precision: start_trl(work, folder, model, precision, threads) for precision in PRECISIONS
    }
    for side in [*sides.values()] * WARM_UP:  # none is still being loaded in the second round
        side.step()
    found = {precision: side.taken[-1]["step"] for precision, side in sides.items()}
    print(
        "  TRL's second step: "
        + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.items())
    )
    fastest = min(found, key=lambda precision: found[precision])
    for precision, side in sides.items():
        if precision != fastest:
            side.end()
    return fastest, sides[fastest]


def measure(work: StepWorkload, layout: StepLayout, rounds: int, machine: Machine) -> None:
    with tempfile.TemporaryDirectory(prefix="megatron-rl-bench-") as name:
        folder = Path(name)
        model = write_model(folder / "model", work)
        precision, trl = fastest_trl(work, folder, model, torch.get_num_threads())
        try:
            with ours(work, folder, model, layout) as (our, run):
                for _ in range(WARM_UP):
                    our.step()
                for _ in range(rounds):
                    our.step()
                    trl.step()
                lines = [json.loads(line) for line in run.metrics.read_text().splitlines()][
                    -rounds:
                ]
        finally:
            trl.end()
    report(
        work,
        machine,
        precision,
        lines,
        [one["step"] for one in our.taken[WARM_UP:]],
        trl.taken[WARM_UP:],
    )


def report(
    work: StepWorkload,
    machine: Machine,
    precision: str,
    lines: list[dict[str, float]],
    our_steps: list[float],
    trl_steps: list[dict[str, float]],
) -> None:
    def middle(values: list[float]) -> float:
        return float(median(values))

    step = middle(our_steps)
    seconds = {
        name: middle([line.get(f"time/{name}", 0.0) for line in lines]) for name in PHASES[:-1]
    }
    seconds["other"] = max(0.0, step - sum(seconds.values()))
    least = floors(work, machine, middle([line["sync/bytes"] for line in lines]))
    print(f"  {'phase':<11} {'ours, s':>8} {'floor, s':>9} {'times':>6}   {'TRL, s':>7}")
    for phase, taken in seconds.items():
        floor = least.get(phase, 0.0) if taken else 0.0
        if floor:
            over = f"{floor:9.4f} {taken / floor:6.1f}"
        else:
            over = f"{'':9} {'':6}"
        theirs = [one[phase] for one in trl_steps if phase in one]
        print(
            f"  {phase:<11} {taken:8.3f} {over}   {middle(theirs):7.3f}"
            if theirs
            else f"  {phase:<11} {taken:8.3f} {over}"
        )
    trl = middle([one["step"] for one in trl_steps])
    ratio = middle([a / b["step"] for a, b in zip(our_steps, trl_steps, strict=True)])
    print(
        f"  {'step':<11} {step:8.3f} {'':16}   {trl:7.3f}   ours / TRL's in {precision}: "
        f"{ratio:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2, help="of the learner")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="of these ranks; they are replicas otherwise"
    )
    fastest = instructions.fastest()
    engines = int(fastest.get("sampler.engines", 1))
    precision = fastest.get("learner.precision", "bf16")
    parser.add_argument(
        "--engines", type=int, default=engines, help="that sample, each on its share of the cores"
    )
    parser.add_argument(
        "--precision", default=precision, choices=("bf16", "fp32"), help="of the learner"
    )
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        be_rank(options.rank_of)
        return
    layout = StepLayout(options.ranks, options.tensor_parallel, options.engines, options.precision)
    install_trl()
    machine = Machine.measured()
    products = f"BF16 {machine.bf16 / 1e9:.0f}, INT8 {machine.int8 / 1e9:.0f} GFLOP/s"
    speeds = f"{products}, copies {machine.copy / 1e9:.1f} GB/s"
    print(f"{torch.get_num_threads()} threads: {speeds}")
    for shape in options.shape or SHAPES:
        work = SHAPES[shape]
        weights = (work.layer_weights + work.head_weights) / 1e6
        print(
            f"{shape}: {weights:.1f}M parameters, {work.answers} answers of {work.response_tokens} "
            "tokens"
        )
        measure(work, layout, options.rounds, machine)


if __name__ == "__main__":
    main()
