"""Settings of a run's engines: from the configuration to vLLM's arguments and a model folder
without weights.

An engine loads no checkpoint: it starts from dummy weights in the layout of the folder's
`quantization_config` (compressed-tensors), and the first sync fills them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config import schema
from megatron_rl.config.evaluation import longest_sequence
from megatron_rl.config.fleet import HOST_CACHE_BYTES, max_sequences, replica_formats
from megatron_rl.engine.readiness import KEEPS_EXPERTS
from megatron_rl.models.model import read_hf_config
from megatron_rl.quantization.formats import quantization_config
from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.weight_sync.wire import BACKEND_PREFIX

WORKER_EXTENSION = "megatron_rl.engine.receiver.WorkerExtension"
GRAPH_SPACING = 16  # tokens between the largest CUDA graphs
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
HEAD = "head_dtype"  # read from the model's config.json, where vLLM looks for it
VLLM_WORKER_EXTENSION = "megatron_rl.engine.vllm_receiver.WorkerExtension"


@dataclass(frozen=True)
class EngineSettings:
    """Engine settings of a run, made once from the configuration for every engine and server."""

    sampler: schema.SamplerSection
    quantization: schema.QuantizationSection
    formats: tuple[schema.Format, ...]  # one per engine
    transport: schema.Transport
    max_tokens: int  # of prompt and response together
    seed: int
    device: schema.Device
    # effect of an update on responses in progress
    in_flight: schema.InFlight = schema.InFlight.drain
    routed_experts: bool = False  # responses come with the experts of every token read
    head: schema.Precision = schema.Precision.bf16  # precision of the logits
    # logprobs per sampled token, for its sampling support and top tokens
    candidates: int = 0

    @classmethod
    def from_config(cls, config: schema.Config) -> EngineSettings:
        return cls(
            sampler=config.sampler,
            quantization=config.quantization,
            formats=replica_formats(config.sampler, config.quantization),
            transport=config.sync.transport,
            max_tokens=longest_sequence(config.rollout, config.eval),
            seed=config.run.seed,
            device=config.run.device,
            in_flight=config.rollout.in_flight,
            routed_experts=config.learner.router is schema.Router.replay,
            head=config.model.head_precision,
            candidates=max(config.rollout.candidates, config.rollout.top_logprobs.max),
        )

    def with_format(self, format: schema.Format) -> EngineSettings:
        """Return these settings with another weight format, for one of several engines."""
        return replace(self, quantization=replace(self.quantization, format=format))


def engine_arguments(
    settings: EngineSettings, folder: Path, worker_extension: str = WORKER_EXTENSION
) -> dict[str, Any]:
    """Return the keyword arguments of `vllm.LLM`, as plain data that can be sent to the child
    process.
    """
    sampler = settings.sampler
    backend = str(settings.transport.value)
    if settings.transport != schema.Transport.file:  # vLLM's own engines, with our checks in front
        backend = BACKEND_PREFIX + backend
        if worker_extension == WORKER_EXTENSION:
            worker_extension = VLLM_WORKER_EXTENSION
    gpu = settings.device == schema.Device.cuda or (
        settings.device == schema.Device.auto and torch.cuda.is_available()
    )
    arguments: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling parameters come from the recipe only
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": sampler.tensor_parallel,
        "max_model_len": settings.max_tokens,
        "max_num_seqs": max_sequences(sampler),
        "max_num_batched_tokens": max(settings.max_tokens, 4096),
        "seed": settings.seed,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": backend},
        "worker_extension_cls": worker_extension,
        "enable_prefix_caching": True,  # of the current weights only: engine/generation.py
        "enforce_eager": not gpu,
        # a chunked prefill of a seeded request reads the generator's offset, which only CUDA has
        "enable_chunked_prefill": gpu,
    }
    if settings.routed_experts:
        arguments["enable_return_routed_experts" if gpu else KEEPS_EXPERTS] = True
    if settings.candidates:
        arguments["max_logprobs"] = settings.candidates
    if settings.quantization.kv_cache == schema.KvCache.fp8:
        arguments["kv_cache_dtype"] = "fp8"
    arguments |= gpu_arguments(sampler) if gpu else {"kv_cache_memory_bytes": HOST_CACHE_BYTES}
    if sampler.tensor_parallel > 1:
        arguments["distributed_executor_backend"] = "mp"
    given = dict(sampler.vllm)
    if settings.head is schema.Precision.fp32:
        given["hf_overrides"] = {**(given.get("hf_overrides") or {}), HEAD: "float32"}
    return arguments | given


def gpu_arguments(sampler: schema.SamplerSection) -> dict[str, Any]:
    """Return additional arguments of an engine on GPUs.

    Nothing that FlashInfer compiles or downloads at engine start: nodes may have no network and no
    compiler. CUDA graphs up to the batch size: vLLM's own limits are twice that, and 512.
    """
    graphs = math.ceil(max_sequences(sampler) / GRAPH_SPACING) * GRAPH_SPACING
    return {
        "enable_sleep_mode": True,
        "kernel_config": {"enable_flashinfer_autotune": False},
        "compilation_config": {
            "pass_config": {"fuse_allreduce_rms": False},
            "max_cudagraph_capture_size": graphs,
        },
    }


def write_engine_folder(
    hf_folder: Path, target: Path, quantization: schema.QuantizationSection
) -> Path:
    """Write config.json with the quantized layout. Requests carry token ids: the tokenizer is for
    tool calls only.
    """
    model = read_hf_config(hf_folder)
    if "quantization_config" in model:
        raise ValueError(
            f"model.path={hf_folder} is already quantized; give the BF16 model and set "
            "quantization.format"
        )
    layout = quantization_config(quantization.format, quantization.ignore, quantization.kv_cache)
    if layout is not None:
        model["quantization_config"] = layout
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(model, indent=1))
        for name in TOKENIZER_FILES:
            if (hf_folder / name).is_file() and not (target / name).exists():
                (target / name).symlink_to((hf_folder / name).absolute())
    except OSError as error:
        raise SamplerError(
            f"the engine's folder {target} cannot be written: {error}. Free space in the temporary "
            "folder, or set TMPDIR to another one"
        ) from error
    return target
