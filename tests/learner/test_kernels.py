"""The learner's Triton kernels without a GPU: interpreted, counted, and compiled for the GPUs that they are for."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import learner_cases as cases
import preloaded
import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from megatron_rl.learner.modules import costs, head, logprobs, triton_kernels
from megatron_rl.learner.modules.kernels import INTERPRET

ROOT = Path(__file__).parents[2]
CONSTRAINTS = [(ROOT / "constraints" / f"{name}.txt").read_text().split() for name in ("cpu", "gpu")]


def test_the_kernels_are_compiled_by_the_triton_of_gpus() -> None:
    ours, theirs = ([pin for pin in pins if pin.startswith("triton==")] for pins in CONSTRAINTS)
    assert ours == theirs != []


def test_the_interpreter_computes_what_torch_computes() -> None:
    file = Path(__file__).with_name("interpreted_kernels.py")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-W", "ignore", str(file)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, INTERPRET: "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


# updates of learners whose kernels are interpreted

PACKS = {"tokens_per_microbatch": 80}
LAYOUTS = {"one": {}, "tp2_sp": cases.LAYOUTS["tp2_sp"]}
PASSES: dict[str, dict[str, Any]] = {
    "held": {"steps": 1, "entropy_coef": 0.1},
    "columns": {"steps": 1, "entropy_coef": 0.1, "columns": 16},
    "kept": {"steps": 1, "kept": True},
    "norms": {"kind": "activations", "smoothing": 0.5},
}


@pytest.fixture(scope="module")
def updates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results by "1" (interpreted) and "0" (torch), then by job."""
    found = {}
    for interpret in ("0", "1"):
        jobs = [
            [
                {"name": f"{at} {name}", "hf": cases.QWEN3, "layout": PACKS | layout, **job}
                for name, job in PASSES.items()
            ]
            for at, layout in LAYOUTS.items()
        ]
        # parents of their own: they import Triton
        with mock.patch.dict(os.environ, {INTERPRET: interpret}), preloaded.parents():
            found[interpret] = cases.run(tmp_path_factory, *jobs)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in PASSES if name != "norms"])
@pytest.mark.parametrize("at", LAYOUTS)
def test_updates_are_the_same(at: str, name: str, updates: dict[str, dict[str, Any]]) -> None:
    here, there = (updates[interpret][f"{at} {name}"] for interpret in "10")
    assert (cases.matrix(here) - cases.matrix(there)).abs().max() < 1e-5
    assert here["steps"][0] == pytest.approx(there["steps"][0], rel=1e-4, abs=1e-5)
    assert here != there or name == "kept", "another order of the sums"


@pytest.mark.ranks
@pytest.mark.parametrize("at", LAYOUTS)
def test_maxima_of_norms_are_the_same(at: str, updates: dict[str, dict[str, Any]]) -> None:
    here, there = (updates[interpret][f"{at} norms"]["amax"] for interpret in "10")
    assert here == there


# launches

ROWS, VOCAB, HIDDEN = 14_563, 151_936, 1024  # a ninth of 131,072 response tokens of Qwen3-0.6B


class Launches(TorchDispatchMode):
    """Counts of operations that are neither views nor allocations, and of Triton's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns]
        name = func._schema.name.removeprefix("aten::")
        self.counts[name] += not (any(views) or "empty" in name)
        return func(*args, **(kwargs or {}))

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.counts.update(["kernel"])


def launches(columns: int, entropy: bool, backward: bool) -> Counter[str]:
    """Of one pack's output layer, on tensors without content, at so many columns a time."""
    made = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    layer: Any = SimpleNamespace(weight=torch.empty(VOCAB, HIDDEN, **made), allreduce_dgrad=False, _forward_impl=None)
    pack: Any = SimpleNamespace(labels_N=torch.empty(ROWS, dtype=torch.int64, device="meta"), kept_NK=None)
    asked = head.Asked(logprobs.VocabShare.of(0, 1, VOCAB, VOCAB, None), 1.0, entropy)
    seen = Launches()
    kernels = dict.fromkeys(("statistics_kernel", "gradient_kernel"), seen)
    with (
        mock.patch.object(logprobs, "kernels_for", return_value=triton_kernels),
        mock.patch.multiple(triton_kernels, **kernels),
        mock.patch.object(head, "logit_columns", return_value=columns),
        seen,
    ):
        found = head.scores(layer, torch.empty(ROWS, 1, HIDDEN, **made), None, pack, asked, held=False)
        if backward:
            loss = found.logprobs_N.sum()
            (loss if found.entropy_N is None else loss + found.entropy_N.sum()).backward()
    return seen.counts


@pytest.mark.parametrize("entropy", [True, False])
def test_launches_of_a_pack(entropy: bool) -> None:
    """For each chunk of columns two kernels, one sum, and the products."""
    columns = costs.logit_columns(ROWS, VOCAB, 2, wide=False)
    chunks = -(-VOCAB // columns)
    found = launches(columns, entropy, backward=True)
    assert (found["kernel"], found["mm"] + found["mm.out"], found["add_"]) == (2 * chunks, 4 * chunks, chunks)
    assert found.total() <= 7 * chunks + 20
    scored = launches(columns, entropy, backward=False)
    assert scored["kernel"] == scored["mm"] == chunks
    assert scored.total() <= 2 * chunks + 10


# compilation

GPUS = (80, 90, 100)
VALUES = ("logits", "grad", "x", "weight")
NUMBERS = {"stats": "*fp32", "ids": "*i64", "labels": "*i64", "amax": "*fp32", "temperature": "fp32", "eps": "fp32"}
NUMBERS |= dict.fromkeys(("of_logprobs", "of_entropy", "log_norms", "means"), "*fp32")
ALIGNED = ("stride", "grad_stride", "real", "columns", "width")  # as multiples of 16
TILE = {"BLOCK": triton_kernels.COLUMNS}
# kernel, its constants, warps
COMPILED: dict[str, tuple[Any, dict[str, Any], int]] = {
    "statistics": (triton_kernels.statistics_kernel, {"IDS": 1, "MEAN": True, "SCALED": False, **TILE}, 4),
    "scaled statistics": (triton_kernels.statistics_kernel, {"IDS": 64, "MEAN": True, "SCALED": True, **TILE}, 4),
    "logprobs alone": (triton_kernels.statistics_kernel, {"IDS": 1, "MEAN": False, "SCALED": False, **TILE}, 4),
    "gradient": (triton_kernels.gradient_kernel, {"ENTROPY": False, "SCALED": False, **TILE}, 4),
    "scaled gradient": (triton_kernels.gradient_kernel, {"ENTROPY": True, "SCALED": True, **TILE}, 4),
    "norm": (triton_kernels.norm_amax_kernel, {"NORM": True, "POSITIONS": 16, "WIDTH": 1024}, 4),
    "wide norm": (triton_kernels.norm_amax_kernel, {"NORM": True, "POSITIONS": 16, "WIDTH": 8192}, 16),
}  # fmt: skip


def instructions(name: str, gpu: int, dtype: str, aligned: bool) -> str:
    kernel, constants, warps = COMPILED[name]
    types = {one: f"*{dtype}" if one in VALUES else NUMBERS.get(one, "i32") for one in kernel.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    divisible = [one for one, type in types.items() if type[0] == "*" or (aligned and one in ALIGNED)]
    place = kernel.arg_names.index
    source = ASTSource(
        kernel,
        types,
        constexprs={(place(one),): value for one, value in constants.items()},
        attrs={(place(one),): [["tt.divisibility", 16]] for one in divisible},
    )
    made = triton.compile(source, target=GPUTarget("cuda", gpu, 32), options={"num_warps": warps})
    assert len(made.asm["cubin"]) > 1000
    return made.asm["ptx"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_kernels(name: str, gpu: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In registers alone; 16 bytes at a time from aligned rows; BF16 rounded to the nearest."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for aligned in (True, False):
        ptx = instructions(name, gpu, dtype, aligned)
        (tmp_path / "kernel.ptx").write_text(ptx)
        target = re.findall(r"\.target (\w+)", ptx)[0]
        command = [get_ptxas(gpu).path, "-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.cubin"]
        told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr
        assert re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", told) == [("0", "0", "0")]
        assert int(re.findall(r"Used (\d+) registers", told)[0]) <= 64
        assert bool(re.search(r"ld\.global\.v4\.b32", ptx)) or not aligned
    if "gradient" in name and dtype == "bf16":
        assert re.search(r"cvt\.rn\.bf16", ptx) and not re.search(r"cvt\.rz\.bf16", ptx)
