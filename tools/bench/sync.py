#!/usr/bin/env python3
"""Cost of a weight sync: learner ranks with TP shards, a live engine, every phase timed.

    python tools/bench/sync.py [--formats none int8 fp8] [--tensor-parallel 2] [--repeats 5]

For each format: bytes, time per phase, the ratio to a plain memory copy of the BF16 weights, and
the ratio to the naive path. Both paths take turns in one run; medians are shown. The learner's
ranks hold random weights and do nothing else meanwhile.

The naive path gathers everything in BF16 to one rank, quantizes it there, writes it, and only then
has the same engine load it in place, with vLLM's own loaders and its own packing (zero-point sums
of INT8 included). It quantizes as one writes it down, each step over the whole tensor; `tuned` is
the same path with this project's quantizer, which works in pieces that stay in cache and makes the
same bytes. Both keep our gather, files, checksums and FP8 kernel.

`blocked` is the part of a sync in which the engine cannot generate: swapping the new weights in.
While they are checked and built beside the present ones it can; the line under the table says how
it answered meanwhile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rl.config.schema import (
    Config,
    Format,
    LearnerSection,
    ModelSection,
    QuantizationSection,
    RolloutSection,
    SamplerSection,
)
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import params, stage_params
from megatron_rl.models.model import Model
from megatron_rl.models.shards import ShardGroups
from megatron_rl.processes.threads import in_thread
from megatron_rl.quantization.formats import is_quantized
from megatron_rl.quantization.quantize import quantize
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Prompt, SamplingParams
from megatron_rl.weight_sync.file_transport import remove_version, update_info, write_version
from megatron_rl.weight_sync.push import WeightSync
from megatron_rl.weight_sync.source import ShardSource

MARK = "ordinary"  # see ordinary_receiver.py
PHASES = ("quantize", "gather", "transfer", "load")


class RandomWeights:
    """A learner's shards without the learner."""

    def __init__(self, model: Model, place: Place) -> None:
        self.model = model
        self.groups = ShardGroups(place)
        generator = torch.Generator().manual_seed(place.tp)
        self._parameters = [
            (
                param.megatron,
                (
                    torch.randn(param.local_shape(model.layout), generator=generator) * 0.02
                ).bfloat16(),
            )
            for param in stage_params(model.shape, model.layout, place)
        ]

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return self._parameters


def hf_config(given: argparse.Namespace) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": given.hidden,
        "num_hidden_layers": given.layers,
        "num_attention_heads": given.hidden // 64,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": given.ffn,
        "vocab_size": given.vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


Quantizer = Callable[[torch.Tensor, Format], dict[str, torch.Tensor]]


def plain_quantize(weight_OI: torch.Tensor, format: Format) -> dict[str, torch.Tensor]:
    """Symmetric, per output row: step by step over the whole tensor."""
    largest, dtype = (127.0, torch.int8) if format == Format.int8 else (448.0, torch.float8_e4m3fn)
    values_OI = weight_OI.float()
    scale_O1 = values_OI.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / largest
    scaled_OI = (values_OI / scale_O1).clamp(-largest, largest)
    if format == Format.int8:
        scaled_OI = scaled_OI.round()
    return {"weight": scaled_OI.to(dtype), "weight_scale": scale_O1}


def naive(
    source: ShardSource,
    weights: RandomWeights,
    sampler: Sampler | None,
    config: Config,
    to: Path,
    version: int,
    quantizer: Quantizer,
) -> float:
    """BF16 to one rank, quantized there, written, loaded in the ordinary way."""
    started = time.perf_counter()
    gathered = list(source.tensors(dict(weights.named_parameters())))
    if sampler is not None:
        section = config.quantization

        def converted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in gathered:
                if is_quantized(name, section.format, section.ignore):
                    for suffix, value in quantizer(tensor, section.format).items():
                        yield name.removesuffix("weight") + suffix, value
                else:
                    yield name, tensor

        write_version(to, version, converted(), format=section.format.value)
        sampler.start_weight_update()
        sampler.update_weights(update_info(to, version, 1))
        sampler.finish_weight_update(str(version))
        remove_version(to, version)
    dist.barrier()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Answers:
    """Small requests that an engine answered, one after the other."""

    count: int
    median_s: float
    slowest_s: float

    @classmethod
    def ask(cls, sampler: Sampler, go_on: Callable[[int], bool]) -> Answers:
        prompt = Prompt(0, (1, 2, 3, 4), "", {})
        params = SamplingParams(samples=1, max_tokens=1)
        times: list[float] = []
        while go_on(len(times)):
            started = time.perf_counter()
            sampler.generate([prompt], params, seed=0)
            times.append(time.perf_counter() - started)
        if times:
            return cls(len(times), statistics.median(times), max(times))
        return cls(0, 0.0, 0.0)


def answers_meanwhile(
    source: ShardSource, weights: RandomWeights, sampler: Sampler | None, to: Path, version: int
) -> list[Answers]:
    """Responses of the engine when it is idle, and while the next weights are being built."""
    tensors = source.tensors(dict(weights.named_parameters()))
    if sampler is None:
        list(tensors)
        return []
    write_version(to, version, tensors, format="")
    idle = Answers.ask(sampler, lambda count: count < 20)
    sampler.start_weight_update()
    staged = in_thread(
        "staged", lambda: sampler.update_weights(update_info(to, version, 1, background=True))
    )
    meanwhile = Answers.ask(sampler, lambda count: not staged.done())
    staged.result()
    sampler.finish_weight_update(str(version))
    remove_version(to, version)
    return [idle, meanwhile]


def copy_seconds(nbytes: int, repeats: int = 5) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def run_rank(rank: int, rendezvous: str, given: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(given.threads)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=given.tensor_parallel
    )
    model = Model.of(hf_config(given), Layout(tp=given.tensor_parallel))
    weights = RandomWeights(model, Place(tp=rank))
    plain_bytes = sum(
        tensor.nbytes for param in params(model.shape) for tensor in _meta(param.shapes)
    )
    copy = copy_seconds(plain_bytes) if rank == 0 else 0.0
    dist.barrier()
    results = []
    for name in given.formats:
        config = Config(
            model=ModelSection(path=folder),
            learner=LearnerSection(tensor_parallel=given.tensor_parallel),
            quantization=QuantizationSection(format=Format(name)),
            rollout=RolloutSection(max_prompt_tokens=64, max_response_tokens=64),
            sampler=SamplerSection(vllm={"max_num_seqs": 8, "kv_cache_memory_bytes": 200 << 20}),
        )
        if rank == 0:
            sampler = Sampler(
                EngineSettings.from_config(config),
                Path(folder),
                Path(folder) / f"log_{name}",
                worker_extension="ordinary_receiver.Extension",
            )
        else:
            sampler = None
        if sampler is not None:
            sampler.start()
        try:
            result = measure(weights, sampler, config, given.repeats)
        finally:
            if sampler is not None:
                sampler.close()
        if rank == 0:
            results.append({"format": name, "plain_bytes": plain_bytes, "copy_s": copy} | result)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def measure(
    weights: RandomWeights,
    sampler: Sampler | None,
    config: Config,
    repeats: int,
) -> dict[str, Any]:
    model = weights.model
    groups = weights.groups
    quantization = config.quantization
    sync = WeightSync(weights, sampler, config)
    plain = ShardSource(model, groups)
    quantized = ShardSource(model, groups, quantization.format, quantization.ignore)
    reports = []
    naive_s = []
    tuned_s = []
    engine = []
    versions = iter(range(1000))
    sync.push(next(versions))  # warms both sides up
    ordinary = sync.transport.directory / "ordinary_versions"
    if sampler is not None:
        ordinary.mkdir()
        (ordinary / MARK).touch()
    try:
        for _ in range(repeats):
            dist.barrier()
            naive_s.append(
                naive(plain, weights, sampler, config, ordinary, next(versions), plain_quantize)
            )
            dist.barrier()
            tuned_s.append(
                naive(plain, weights, sampler, config, ordinary, next(versions), quantize)
            )
            dist.barrier()
            reports.append(sync.push(next(versions)))
            engine.append(sampler.last_sync if sampler is not None else {})
        answers = answers_meanwhile(
            quantized, weights, sampler, sync.transport.directory, next(versions)
        )
    finally:
        sync.close()

    def median(phase: str) -> float:
        return statistics.median(getattr(report.seconds, phase) for report in reports)

    return {
        **{phase: median(phase) for phase in (*PHASES, "total")},
        "engine": {key: statistics.median(one[key] for one in engine) for key in engine[0]},
        "answers": [asdict(one) for one in answers],
        "nbytes": reports[0].nbytes,
        "naive_s": statistics.median(naive_s),
        "tuned_s": statistics.median(tuned_s),
        "quant_error_max": reports[0].metrics().get("sync/quant_error_max", 0.0),
    }


def _meta(shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in shapes]


def table(results: list[dict[str, Any]]) -> list[str]:
    head = (
        "format",
        "MiB",
        *(f"{phase} ms" for phase in PHASES),
        "total ms",
        "naive ms",
        "/ naive",
        "/ tuned",
        "/ copy",
        "blocked",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in results:
        cells = [
            row["format"],
            f"{row['nbytes'] / 2**20:.0f}",
            *(f"{row[phase] * 1e3:.0f}" for phase in (*PHASES, "total", "naive_s")),
            f"{row['total'] / row['naive_s']:.2f}",
            f"{row['total'] / row['tuned_s']:.2f}",
            f"{row['total'] / row['copy_s']:.0f}",
            f"{row['engine']['load_s'] / row['total']:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def explanation(row: dict[str, Any]) -> list[str]:
    """Times of one format, largest first, and of the engine meanwhile."""
    engine = row["engine"]
    parts = {
        "packing in the engine": engine["build_s"],
        "reading and checksums in the engine": engine["verify_s"],
        "swapping": engine["load_s"],
        "messages to the engine": row["load"]
        - sum(engine[key] for key in ("build_s", "verify_s", "load_s")),
        **{f"{phase} in the learner": row[phase] for phase in ("quantize", "gather", "transfer")},
    }
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    shares = ", ".join(
        f"{name} {value * 1e3:.0f} ms ({value / row['total']:.0%})" for name, value in ranked
    )
    idle, meanwhile = (Answers(**one) for one in row["answers"])
    return [
        f"{row['format']}: {shares}; worst relative error {row['quant_error_max']:.4f}",
        f"{row['format']}: while the next weights were built the engine answered "
        f"{meanwhile.count} requests, median {meanwhile.median_s * 1e3:.0f} ms, slowest "
        f"{meanwhile.slowest_s * 1e3:.0f} ms (idle: {idle.median_s * 1e3:.0f} ms, "
        f"{idle.slowest_s * 1e3:.0f} ms)",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", default=["none", "int8", "fp8"])
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="per learner rank")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--ffn", type=int, default=2560)
    parser.add_argument("--vocab", type=int, default=16000)
    parser.add_argument("--timeout", type=float, default=600.0)
    given = parser.parse_args()
    # the engine's process finds ordinary_receiver.py there
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    with tempfile.TemporaryDirectory(prefix="megatron-rl-bench-") as folder:
        Path(folder, "config.json").write_text(json.dumps(hf_config(given)))
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=run_rank, args=(rank, f"{folder}/store", given, folder))
            for rank in range(given.tensor_parallel)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + given.timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            if process.is_alive():
                process.kill()
        if any(codes) or None in codes:
            print(f"error: learner ranks ended with {codes}", file=sys.stderr)
            return 1
        results = json.loads(Path(folder, "results.json").read_text())
    parameters = results[0]["plain_bytes"] / 2 / 1e6
    print(
        f"{parameters:.0f}M parameters, learner TP{given.tensor_parallel}, engine TP1; a plain "
        "copy of the BF16 bytes"
    )
    print(
        f"({results[0]['plain_bytes'] / 2**20:.0f} MiB) takes {results[0]['copy_s'] * 1e3:.1f} ms"
    )
    print("\n".join(table(results)))
    print("\n".join(line for row in results for line in explanation(row)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
