#!/usr/bin/env python3
"""Bytes that a sync moves, counted, beside the least that could move: four learner ranks, an
engine of two.

    python tools/bench/sync_shares.py [--formats int8 fp8] [--repeats 3] [--hidden 512]

A dense model by TP2 x PP2, and a mixture by TP2 x PP2 with its experts over EP2, with random
weights. Counted are the bytes of each writer's files and those that a rank of the engine reads; the
plan (`megatron-rl plan`) says both before, and the bound. `paused`: the part of a sync in which the
engine answers nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.apps.planner.traffic import SamplerLayout, links, lower_bound, plan_sync
from megatron_rl.config.schema import (
    Config,
    Format,
    ModelSection,
    QuantizationSection,
    RolloutSection,
    SamplerSection,
    Transport,
)
from megatron_rl.distributed import TorchGroup
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import stage_params
from megatron_rl.models.model import Model
from megatron_rl.models.shards import ShardGroups
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Prompt, SamplingParams
from megatron_rl.weight_sync import manifest
from megatron_rl.weight_sync.file_transport import manifest_path
from megatron_rl.weight_sync.push import WeightSync

RANKS = 4
ENGINE_TP = 2
HOST_EXPERTS = [r"re:.*\.experts\..*"]  # no CPU kernel for quantized ones
LAYOUTS = {"dense": Layout(tp=2, pp=2), "mixture": Layout(tp=2, pp=2, ep=2, etp=1)}


def hf_config(kind: str, hidden: int) -> dict[str, Any]:
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 3 * hidden,
        "vocab_size": 8192,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if kind == "dense":
        return shape
    experts = {
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden,
        "norm_topk_prob": True,
    }
    experts |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return shape | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | experts


class RandomWeights:
    """A learner's shards without the learner."""

    def __init__(self, model: Model, rank: int) -> None:
        layout = model.layout
        self.model = model
        place = layout.place(rank)
        # made on every rank
        groups = [dist.new_group([2 * stage, 2 * stage + 1]) for stage in range(layout.pp)]
        alone = [dist.new_group([one]) for one in range(RANKS)]
        tensor = TorchGroup(groups[place.pp])
        self.groups = ShardGroups(
            place, tensor, TorchGroup(alone[rank]) if layout.expert_tp == 1 else tensor
        )
        generator = torch.Generator().manual_seed(rank)
        self._parameters = [
            (
                param.megatron,
                (torch.randn(param.local_shape(layout), generator=generator) * 0.02).bfloat16(),
            )
            for param in stage_params(model.shape, layout, place)
        ]

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return self._parameters


def run_rank(rank: int, kind: str, given: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    weights = RandomWeights(Model.of(hf_config(kind, given.hidden), LAYOUTS[kind]), rank)
    results = []
    for name in given.formats:
        config = Config(
            model=ModelSection(path=folder),
            quantization=QuantizationSection(
                format=Format(name), ignore=HOST_EXPERTS * (kind == "mixture")
            ),
            rollout=RolloutSection(max_prompt_tokens=32, max_response_tokens=32),
            sampler=SamplerSection(
                tensor_parallel=ENGINE_TP,
                vllm={"max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20},
            ),
        )
        settings = EngineSettings.from_config(config)
        if rank == 0:
            sampler = Sampler(settings, Path(folder), Path(folder) / f"log_{name}")
        else:
            sampler = None
        if sampler is not None:
            sampler.start()
        try:
            found = measure(weights, sampler, config, given.repeats)
        finally:
            if sampler is not None:
                sampler.close()
        results.append({"kind": kind, "format": name} | found)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def measure(
    weights: RandomWeights, sampler: Sampler | None, config: Config, repeats: int
) -> dict[str, Any]:
    sync = WeightSync(weights, sampler, config)
    paused = []
    read = 0
    written = []
    try:
        for version in range(repeats + 1):  # the first warms both sides up
            report = sync.push(version)
            if sampler is not None:
                said = sampler.last_sync
                paused.append(said["pause_s"] / report.seconds.total)
                read = said["nbytes"]
                folder = sync.transport.directory
                writers = range(
                    len([*manifest_path(folder, version, 0).parent.glob("manifest-*.json")])
                )
                parts = [
                    manifest.read(manifest_path(folder, version, writer)) for writer in writers
                ]
                written = [
                    sum(part.stored_bytes for entry in one.tensors for part in entry.parts)
                    for one in parts
                ]
        if sampler is None:
            return {}
        (answer,) = sampler.generate(
            [Prompt(0, (1, 2, 3), "", {})],
            SamplingParams(samples=1, max_tokens=2),
            seed=0,
        )
        assert answer, "the engine answers with what it was sent"
    finally:
        sync.close()
    return {
        "written": written,
        "read": read,
        "paused": statistics.median(paused[1:]),
    } | planned(weights.model, config)


def planned(model: Model, config: Config) -> dict[str, int]:
    plan = plan_sync(model, config.quantization.format, config.quantization.ignore)
    engine = SamplerLayout(ENGINE_TP)
    ends = {link.kind: link.end for link in links(plan, engine, Transport.file)}
    bound = lower_bound(plan, model, engine)
    return {
        "planned_write": ends["learner -> files"],
        "planned_read": ends["files -> sampler"],
        "bound_out": bound.out,
        "bound_into": bound.into,
    }


def run(kind: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="megatron-rl-bench-") as folder:
        Path(folder, "config.json").write_text(json.dumps(hf_config(kind, given.hidden)))
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=run_rank, args=(rank, kind, given, folder))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(given.timeout)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        if any(code != 0 for code in codes):
            raise SystemExit(f"error: learner ranks ended with {codes}")
        return json.loads(Path(folder, "results.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=list(LAYOUTS),
        choices=list(LAYOUTS),
    )
    parser.add_argument("--formats", nargs="+", default=["int8"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--json", action="store_true", help="numbers alone")
    given = parser.parse_args()
    rows = [row for kind in given.kinds for row in run(kind, given)]
    if given.json:
        print(json.dumps(rows))
        return 0
    print(
        "| model | format | busiest writer MiB | / bound | a rank reads MiB | / bound | whole MiB "
        "| paused |"
    )
    print("|" + "---|" * 8)
    for row in rows:
        most = max(row["written"])
        mib = 2**20
        print(
            f"| {row['kind']} | {row['format']} | {most / mib:.1f} | {most / row['bound_out']:.2f} "
            f"| {row['read'] / mib:.1f} | {row['read'] / row['bound_into']:.3f} | "
            f"{sum(row['written']) / mib:.1f} | {row['paused']:.1%} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
