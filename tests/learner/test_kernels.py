"""The learner's Triton kernels without a GPU: interpreted, counted, and compiled for the GPUs that
they are for.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import learner_cases as cases
import preloaded
import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from megatron_rl.learner.modules import costs, head, logprobs, triton_kernels
from megatron_rl.learner.modules.kernels import INTERPRET

ROOT = Path(__file__).parents[2]
# a ninth of 131,072 response tokens of Qwen3-0.6B
ROWS = 14_563
VOCAB = 151_936
HIDDEN = 1024


def test_kernels_are_compiled_by_the_triton_of_gpus() -> None:
    pins = [(ROOT / "constraints" / f"{name}.txt").read_text().split() for name in ("cpu", "gpu")]
    ours, theirs = ([pin for pin in some if pin.startswith("triton==")] for some in pins)
    assert ours == theirs != []


def test_the_interpreter_computes_what_torch_computes() -> None:
    file = Path(__file__).with_name("interpreted_kernels.py")
    options = "-p no:xdist -p no:cacheprovider -W ignore"
    command = [sys.executable, "-m", "pytest", *options.split(), str(file)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, INTERPRET: "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


@pytest.mark.ranks
def test_updates_of_a_learner_are_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    """On ranks that share the vocabulary; its logits whole, and some columns at a time."""
    job = {
        "kind": "one_update",
        "hf": cases.QWEN3,
        "layout": cases.LAYOUTS["tp2_sp"],
        "scored": False,
    }
    jobs = [
        {**job, "smoothing": 0.5, "entropy_coef": 0.1, "name": str(one), "columns": one}
        for one in (None, 16)
    ]
    found = []
    for interpret in ("0", "1"):
        # parents of their own, as they import Triton
        with mock.patch.dict(os.environ, {INTERPRET: interpret}), preloaded.parents():
            found.append(cases.run_ranks(2, jobs, tmp_path_factory.mktemp("ranks")))
    for ours, kernels in zip(*(one.values() for one in found), strict=True):
        assert ours["looks"] and not kernels["looks"], "maxima of norms by a kernel"
        assert kernels["amax"] == ours["amax"]
        assert kernels["metrics"] == pytest.approx(ours["metrics"], rel=1e-4, abs=1e-5)
        assert kernels["prox"] != ours["prox"], "sums of another order"
        # Adam's first step makes much of rounding
        cases.close(kernels, ours, 1e-5, "prox")
        cases.close(kernels, ours, 1e-3, "after")


@contextmanager
def launches() -> Iterator[list[Any]]:
    """Launches on tensors without content: kernels, arguments, constants."""
    found = []
    recorders = {}
    for name in ("statistics_kernel", "gradient_kernel", "norm_amax_kernel"):
        recorders[name] = recorder = mock.MagicMock()
        recorder.__getitem__.return_value = partial(_record, found, getattr(triton_kernels, name))
    with (
        mock.patch.object(logprobs, "kernels_for", return_value=triton_kernels),
        mock.patch.multiple(triton_kernels, **recorders),
        torch.device("meta"),
    ):
        yield found


def _record(found: list[Any], kernel: Any, *args: Any, **constants: Any) -> None:
    found.append((kernel, args, constants))


def head_pass(vocab: int, dtype: torch.dtype, top: int) -> None:
    """Run a pack forward and backward through the output layer, some columns at a time."""
    hidden_NH, weight_VH = (
        torch.empty(size, HIDDEN, dtype=dtype, requires_grad=True) for size in (ROWS, vocab)
    )
    asked = head.LogprobRequest(logprobs.VocabShare.of(0, 1, vocab, vocab, None), 0.7)
    columns = costs.logit_columns(ROWS, vocab, dtype.itemsize, wide=False)
    how = head.HeadContext(asked, columns, wide=False, group=None)
    logprobs_NI, entropy_N = head._Head.apply(
        hidden_NH, weight_VH, torch.empty(ROWS, 1 + top, dtype=torch.int64), how
    )
    (logprobs_NI.sum(1) + entropy_N).sum().backward()


@pytest.mark.parametrize("gpu", [80, 90, 100])
@pytest.mark.parametrize(
    ("vocab", "dtype", "top"),
    [
        (VOCAB, torch.bfloat16, 0),
        (VOCAB, torch.bfloat16, 32),
        (VOCAB + 3, torch.bfloat16, 0),
        (VOCAB, torch.float32, 0),
    ],
)
def test_kernels_are_compiled(
    vocab: int,
    dtype: torch.dtype,
    top: int,
    gpu: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 bytes at a time, but where columns are odd; BF16 rounded to the nearest."""
    with launches() as found:
        head_pass(vocab, dtype, top)
        x_MH = torch.empty(ROWS, HIDDEN, dtype=dtype)
        amax_H = torch.empty(HIDDEN)
        triton_kernels.raise_amax(amax_H, x_MH, amax_H, 1e-6)
    driver = SimpleNamespace(get_current_device=lambda: gpu, get_current_stream=lambda device: 0)
    driver.get_current_target = lambda: GPUTarget("cuda", gpu, 32)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for place in (0, len(found) // 2, -1):
        kernel, args, constants = found[place]
        made = kernel.warmup(*args, grid=(1,), **constants)
        assert made.asm["cubin"]
        assert "ld.global.v4.b32" in made.asm["ptx"] or vocab > VOCAB
        if kernel is triton_kernels.gradient_kernel and dtype == torch.bfloat16:
            assert "cvt.rn.bf16" in made.asm["ptx"] and "cvt.rz.bf16" not in made.asm["ptx"]
