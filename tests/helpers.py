"""Helpers of several packages: the command line in this process, a program in another one, the
text of a refusal.
"""

import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_rl import cli
from megatron_rl.config import ConfigError
from megatron_rl.logs import replace_handlers
from megatron_rl.models.mapping import stored_params
from megatron_rl.models.shape import ModelShape


class Command:
    """`megatron-rl` as it is typed; returns its output, and checks its status."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *words: object, status: int = 0) -> str:
        """Standard output after a success, standard error after a failure."""
        self._capture.readouterr()
        ended = cli.main([str(word) for word in words])
        out, err = map(_elsewhere, self._capture.readouterr())
        assert ended == status, out + err
        return err if status else out

    def dry_run(self, *words: object, recipe: object = "mine.yaml") -> str:
        return self("train", recipe, "--dry-run", *words)

    def refused(self, *words: object, recipe: object = "mine.yaml", dry: bool = True) -> str:
        """Sentences, each on a line of its own."""
        said = self("train", recipe, *["--dry-run"] * dry, *words, status=2)
        assert "Traceback" not in said
        assert all(line.startswith("error: ") for line in said.splitlines()), said
        return said


def _elsewhere(said: str) -> str:
    """The output on any CPU, without the line on missing BF16 instructions."""
    return "".join(
        line for line in said.splitlines(keepends=True) if "this CPU multiplies BF16" not in line
    )


def refusal(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **named)
    return str(caught.value)


def program(code: str, *words: object, **environment: str) -> str:
    """Output of a new interpreter with the paths of this one, which ends well."""
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(
        command, env=around, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    ).stdout


def wait_for(happened: Callable[[], object], what: str = "", seconds: float = 400) -> None:
    """Wait until `happened`; the longer a call takes, the fewer there are."""
    begun = now = time.monotonic()
    while not happened():
        assert now - begun < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.02 + 4 * (time.monotonic() - now))
        now = time.monotonic()


def http_status(port: int, key: str, path: str = "/health", method: str = "GET") -> int:
    """Return the status of a response; with an empty key no Authorization header is sent."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", headers=headers, method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def half_open(port: int, count: int) -> list[socket.socket]:
    """Connections whose request does not end."""
    found = []
    for _ in range(count):
        found.append(socket.create_connection(("127.0.0.1", port), 60))
        with suppress(OSError):  # another one has taken its place already
            found[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: ")
    return found


def write_lines(path: Path, rows: Iterable[object], more: str = "") -> Path:
    """JSON, a row on each line, and what else the file ends with."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + more)
    return path


@contextmanager
def file_system(path: Path, size: str) -> Iterator[Path]:
    """Mount a small tmpfs at `path`; an ordinary folder where mounting is not permitted."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True
    )
    try:
        yield path
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", path], check=True)


# what stands in the recipes that a page's begin with, made small
SMALL = """\
base: {base}
run: {{steps: 2}}
rollout: {{prompts_per_step: 8, samples_per_prompt: {samples}, max_gen_batches: 1}}
learner: {{n_minibatches: 1}}
eval: {{max_prompts: 8}}
log: {{record_every: 1}}
"""


def dapo_row(question: str, answer: str, index: int = 7) -> dict[str, object]:
    """A row of DAPO's table."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": question}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": str(index)},
    }


def small_recipes(folder: Path, **samples: int) -> None:
    """Recipes of those names that take two small steps, with so many answers to a prompt."""
    (folder / "recipes").mkdir()
    for name, count in samples.items():
        base = Path(__file__).parents[1] / "recipes" / f"{name}.yaml"
        (folder / "recipes" / f"{name}.yaml").write_text(SMALL.format(base=base, samples=count))


def block(page: Path, language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)[number]


def logged() -> list[str]:
    """Messages of the log lines from now on, until the test ends."""
    handler = _Messages()
    replace_handlers([handler])
    return handler.lines


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def typed(place: Path, line: str) -> str:
    """Output of a line of a page, in a shell that finds this environment's programs."""
    around = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", line], cwd=place, env=around, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


# overrides that put a colocated one-node recipe on four GPUs and four
APART = (
    "sampler.tensor_parallel=4",
    'sampler.devices="4,5,6,7"',
    "sampler.sleep=none",
    "sampler.vllm.gpu_memory_utilization=0.9",
    "learner.pipeline_parallel=1",
    "learner.offload=none",
    "learner.tokens_per_microbatch=24576",
    "learner.recompute=full",
)


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of the model."""
    return {name: size for p in stored_params(shape) for name, size in p.sizes.items()}
