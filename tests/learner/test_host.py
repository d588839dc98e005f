"""The host profile: what it changes stays as it should be for what else runs in its process."""

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
from nvidia_smi import nvidia_smi
from preloaded import run

DEVICE_CONTEXT = """
import megatron_rl.learner.modules.host
import torch
with torch.device("meta"):
    made = [torch.empty(2), torch.arange(2), torch.ones(2), torch.tensor([1.0]), torch.rand(2), torch.full((2,), 1.0)]
assert all(tensor.is_meta for tensor in made), made
assert torch.empty(2, device="meta").is_meta and torch.zeros(2, device="cuda").device.type == "cpu"
"""


on_hosts = pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="nothing is patched where CUDA exists")


@on_hosts
def test_a_device_context_still_places_tensors() -> None:
    """transformers builds its models under torch.device("meta"); elsewhere their buffers stay uninitialised."""
    done = run("megatron", [sys.executable, "-c", DEVICE_CONTEXT], timeout=240)
    assert done.returncode == 0, done.stderr


EXCHANGES = """
import megatron_rl.learner.modules.host
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def exchanged(exchange, output, input):
    with torch.profiler.profile() as seen:
        exchange(output, input)
        exchange(output, input, async_op=True).wait()
        with dist._coalescing_manager(dist.group.WORLD) as together:
            exchange(output, input, group=dist.group.WORLD)
    return sum(event.name.startswith("c10d::") for event in seen.events())

for exchange in (dist.reduce_scatter_tensor, dist.all_gather_into_tensor):
    there, here = torch.arange(6.0), torch.zeros(6)
    assert exchanged(exchange, here, there) == 3
    assert torch.equal(here, there)
    assert exchanged(exchange, here, here) == 0
    assert torch.equal(here, there)
"""


@on_hosts
def test_a_rank_alone_exchanges_only_what_lies_elsewhere() -> None:
    done = run("megatron", [sys.executable, "-c", EXCHANGES], timeout=240)
    assert done.returncode == 0, done.stderr


UNSEEN = """
import sys
from pathlib import Path
from megatron_rl.config import ConfigError, from_mapping
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.policy import Sections
from megatron_rl.rank import run_rank

config = from_mapping({"run": {"device": "cuda"}})
for start in (lambda: run_rank(config, Path(sys.argv[1])), lambda: Learner(None, Sections.of(config))):
    try:
        start()
    except ConfigError as error:
        print(error)
"""


@on_hosts
@pytest.mark.parametrize("gpus", [0, 2])
def test_where_cuda_is_wanted_no_learner_runs_on_the_host(gpus: int, tmp_path: Path) -> None:
    """A rank before it opens anything, and whatever else builds a learner."""
    nvidia_smi(tmp_path, gpus, "550.127.08")
    environment = {**os.environ, "RANK": "0", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run("megatron", [sys.executable, "-c", UNSEEN, str(tmp_path)], timeout=60, env=environment)
    found = "the NVIDIA driver is 550.127.08" if gpus else "nvidia-smi lists no GPU"
    said = f"run.device: cuda, but torch {metadata.version('torch')} sees no CUDA device; {found}, and torch, built "
    assert [line.startswith(f"{said}for CUDA 13, needs 580") for line in done.stdout.splitlines()] == [True] * 2, done
