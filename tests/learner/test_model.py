"""Rotary embeddings as the layers for GPUs have them: megatron-core's own, over packs."""

import json
import sys

import learner_cases as cases
from preloaded import run

ON_A_GPU = """
import json, sys
from types import SimpleNamespace
from megatron_rl.learner import model as model_module  # before megatron
import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron_rl.config.schema import LearnerSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model

model_module.host = SimpleNamespace(ON_HOST=False)
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
    done = run("megatron", [sys.executable, "-c", ON_A_GPU, families], timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fused"] and found["off"] < 1e-5, found
