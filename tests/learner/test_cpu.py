"""The host profile: what it changes stays as it should be for what else runs in its process. Rotary
embeddings as the layers for GPUs have them: megatron-core's own, over packs.
"""

import json
import os
from importlib import metadata
from pathlib import Path

import learner_cases as cases
import pytest
from nvidia_smi import nvidia_smi
from preloaded import said

DEVICE_CONTEXT = """
import megatron_rl.learner.modules.cpu
import torch
with torch.device("meta"):
    made = [torch.empty(2), torch.arange(2), torch.ones(2), torch.tensor([1.0]), torch.rand(2), torch.full((2,), 1.0)]
assert all(tensor.is_meta for tensor in made), made
assert torch.empty(2, device="meta").is_meta and torch.zeros(2, device="cuda").device.type == "cpu"
"""


on_hosts = pytest.mark.skipif(
    "__import__('torch').cuda.is_available()", reason="nothing is patched where CUDA exists"
)


@on_hosts
def test_a_device_context_still_places_tensors() -> None:
    """transformers builds models under torch.device("meta"); other devices leave buffers unset."""
    said("megatron", ["-c", DEVICE_CONTEXT])


EXCHANGES = """
import megatron_rl.learner.modules.cpu
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
    said("megatron", ["-c", EXCHANGES])


UNSEEN = """
import sys
from pathlib import Path
from megatron_rl.config import ConfigError, from_mapping
from megatron_rl.learner.learner import Learner
from megatron_rl.rank import run_rank

config = from_mapping({"run": {"device": "cuda"}})
for start in (lambda: run_rank(config, Path(sys.argv[1])), lambda: Learner(None, config)):
    try:
        start()
    except ConfigError as error:
        print(error)
"""


@on_hosts
@pytest.mark.parametrize("gpus", [0, 2])
def test_where_cuda_is_wanted_no_learner_runs_on_the_host(gpus: int, tmp_path: Path) -> None:
    """Refused in a rank before it opens anything, and in any other user of a learner."""
    nvidia_smi(tmp_path, gpus, "550.127.08")
    environment = {**os.environ, "RANK": "0", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    lines = said("megatron", ["-c", UNSEEN, tmp_path], env=environment).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("run.device: cuda, ")
        assert metadata.version("torch") in line
        assert ("550.127.08" in line) == bool(gpus)


ON_A_GPU = """
import json, sys
from types import SimpleNamespace
from megatron_rl.learner.modules import model as model_module  # before megatron
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron_rl.config.schema import LearnerSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model

model_module.cpu = SimpleNamespace(ON_CPU=False)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group, (pairs, halves) = dist.group.WORLD, json.loads(sys.argv[1])
try:
    fused = model_module.transformer_config(Model.of(halves, Layout()), LearnerSection()).apply_rope_fusion
except ValueError as error:  # asked for, and Transformer Engine is not here
    fused = "apply_rope_fusion" in str(error)
config = model_module.transformer_config(Model.of(pairs, Layout()), LearnerSection())
starts, width = torch.tensor([0, 2, 6], dtype=torch.int32), config.kv_channels
embedding = RotaryEmbedding(
    width, 1.0, rotary_interleaved=config.rotary_interleaved, use_cpu_initialization=True, cp_group=group
)
given = torch.randn(6, 2, width)
turned = apply_rotary_pos_emb(given, embedding(4, packed_seq=True), config, cu_seqlens=starts, cp_group=group)
angles = torch.tensor([0, 1, 0, 1, 2, 3])[:, None, None] * embedding.inv_freq
wanted = torch.view_as_complex(given.view(6, 2, -1, 2)) * torch.polar(torch.ones(()), angles)
print(json.dumps({"fused": fused, "off": float((turned - torch.view_as_real(wanted).flatten(2)).abs().max())}))
"""


def test_neighbouring_channels_are_turned_as_pairs_and_only_halves_by_the_fused_kernel() -> None:
    families = json.dumps([cases.ERNIE, cases.QWEN3])
    found = json.loads(said("megatron", ["-c", ON_A_GPU, families]).splitlines()[-1])
    assert found["fused"] and found["off"] < 1e-5, found
