"""A place for a run that something bad is about to happen to: a folder and a temporary folder of
its own.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from helpers import wait_for

ROOT = Path(__file__).parent.parent.parent
MEGATRON_RL = (sys.executable, "-m", "megatron_rl.cli")
PATIENCE_S = 600.0  # timeout for the next event of a run
SMALL = (  # a step in a second, once the engines run
    "rollout.prompts_per_step=16",
    "rollout.samples_per_prompt=4",
    "rollout.max_gen_batches=1",
    "learner.n_minibatches=1",
    "eval.every=0",
    "log.record_every=1",
    "sampler.vllm.max_num_seqs=64",
)
# answers of a model that knows nothing differ in it, so that every step has something to learn;
# steps of a second or so leave time to be killed in
REWARD = """
import time, zlib
from pathlib import Path
def score(row, key, response):
    time.sleep({delay})
    while Path("wait here").exists():
        time.sleep(0.1)
    return zlib.crc32(response.encode()) % 7 / 6
"""
needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))),
    reason="needs root and Debian's slurm-wlm and munge",
)


@dataclass
class Box:
    """Processes started here are ended with it."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    # short, as sockets' names are
    tmp: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="box-")))
    _started: list[subprocess.Popen[str]] = field(default_factory=list)
    _trains: Any = None  # the run that was started last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """`megatron-rl WORDS`, in a session of its own; output in the file `screen`. `under`: words
        before it.
        """
        return self.launch([*options.pop("under", ()), *MEGATRON_RL, *words], **options)

    def launch(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        screen = options.pop("stdout", None) or (self.folder / "screen").open("w")
        streams = {"stdout": screen, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        options = {"cwd": self.folder, **streams, **options}
        environment = os.environ | {"TMPDIR": str(self.tmp)} | self.env | options.pop("env", {})
        process = subprocess.Popen(
            command, env=environment, text=True, start_new_session=True, **options
        )
        self._started.append(process)
        return process

    def train(
        self, *overrides: str, recipe: str = "quickstart.yaml", **options: Any
    ) -> subprocess.Popen[str]:
        words = ("train", str(ROOT / "recipes" / recipe), "run.name=run", *SMALL, *overrides)
        self._trains = self.start(*words, **options)
        return self._trains

    def begin(self, *overrides: str, steps: int = 3, **options: Any) -> subprocess.Popen[str]:
        """A run without an end, once it has recorded so many steps."""
        process = self.train("run.steps=100000", *overrides, **options)
        self.until_steps(steps)
        return process

    def goes_on(self, more: int = 2) -> None:
        """Until so many more steps are recorded."""
        self.until_steps(self.steps() + more)

    def until_steps(self, count: int) -> None:
        self.until(lambda: self.steps() >= count, f"{count} lines of metrics")

    def until(self, happened: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
        """While the run goes on."""
        wait_for(lambda: happened() or self._trains.poll() is not None, what, seconds)
        assert self._trains.poll() is None, self.screen

    def rehearse(
        self, script: str, *settings: str, under: Sequence[str] = (), **environment: str
    ) -> Any:
        """A batch script as a job on nodes made for the occasion, with what is in this place."""
        toy = self.folder / "data" / "toy"
        words = [
            "slurm/rehearse.sh",
            f"slurm/{script}.sbatch",
            "recipes/quickstart.yaml",
            "run.name=run",
            *SMALL,
            f"run.root={self.folder}/runs",
            f"data.train={toy}/train.jsonl",
            f"data.eval={toy}/test.jsonl",
        ]
        return self.launch([*under, *words, *settings], cwd=ROOT, env=environment)

    def reward(self, delay_s: float = 0.02) -> None:
        """`reward.name=chance:score`"""
        (self.folder / "chance.py").write_text(REWARD.format(delay=delay_s))

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    @property
    def screen(self) -> str:
        return (self.folder / "screen").read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        return json.loads((self.run / "status.json").read_text())

    def steps(self) -> int:
        """Lines of metrics so far."""
        try:
            return (self.run / "metrics.jsonl").read_text().count("\n")
        except FileNotFoundError:
            return 0

    def metrics(self) -> list[dict[str, Any]]:
        return lines(self.run / "metrics.jsonl")

    def processes(self, words: str = "") -> list[psutil.Process]:
        """Those below what was started here, orphans of its sessions included, whose command holds
        `words`.
        """
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            mine = (process.info["environ"] or {}).get("TMPDIR", "").startswith(str(self.tmp))
            if mine and words in " ".join(process.info["cmdline"] or []):
                found.append(process)
        return found

    def rank(self, number: int) -> psutil.Process:
        ranks = self.processes("megatron_rl.rank")
        return next(
            one for one in ranks if one.is_running() and one.environ().get("RANK") == str(number)
        )

    def until_over(self, seconds: float = 300) -> None:
        """None of its processes is left."""
        wait_for(lambda: not self.processes(), "processes are left", seconds)

    def left_nothing(self) -> None:
        """Neither a process nor a temporary file."""
        assert not self.processes()
        assert not list(self.tmp.iterdir())

    def close(self) -> None:
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        for process in self._started:
            process.wait(120)
        shutil.rmtree(self.tmp, ignore_errors=True)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
