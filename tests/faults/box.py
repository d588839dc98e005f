"""A place for a run that something bad is about to happen to: a folder and a temporary folder of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent.parent
MEGATRON_RL = (sys.executable, "-m", "megatron_rl.cli")
SMALL = (  # a step in a second, once the engines run
    *("rollout.prompts_per_step=16", "rollout.samples_per_prompt=4", "rollout.max_gen_batches=1"),
    *("learner.n_minibatches=1", "eval.every=0", "log.record_every=1", "sampler.vllm.max_num_seqs=64"),
)


@dataclass
class Box:
    """Processes started here are ended with it."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    tmp: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="box-")))  # short, as sockets' names are
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """`megatron-rl WORDS`, in a session of its own; output in the file `screen`. `under`: words before it."""
        return self.launch([*options.pop("under", ()), *MEGATRON_RL, *words], **options)

    def launch(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        screen = options.pop("stdout", None) or (self.folder / "screen").open("w")
        options = {"stdout": screen, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL} | options
        environment = os.environ | {"TMPDIR": str(self.tmp)} | self.env
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, start_new_session=True, **options
        )
        self._started.append(process)
        return process

    def train(self, *overrides: str, recipe: str = "quickstart.yaml", **options: Any) -> subprocess.Popen[str]:
        return self.start("train", str(ROOT / "recipes" / recipe), "run.name=run", *SMALL, *overrides, **options)

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
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    def processes(self, words: str = "") -> list[psutil.Process]:
        """Those below what was started here, orphans of its sessions included, whose command holds `words`."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            mine = (process.info["environ"] or {}).get("TMPDIR", "").startswith(str(self.tmp))
            if mine and words in " ".join(process.info["cmdline"] or []):
                found.append(process)
        return found

    def close(self) -> None:
        for process in self.processes():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        for process in self._started:
            process.wait(120)
        shutil.rmtree(self.tmp, ignore_errors=True)


def wait_for(happened: Callable[[], Any], seconds: float, what: str) -> float:
    """Until it is true; how long that took."""
    start = time.monotonic()
    while not happened():
        assert time.monotonic() - start < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - start
