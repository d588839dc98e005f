"""The engine's view of the model: a folder with a quantized layout, and the arguments vLLM starts with.

The engine never reads weights from disk: it starts from dummy weights in the layout that
`quantization_config` (compressed-tensors) describes, and the first sync fills them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.schema import Config, Device, KvCache, Transport
from megatron_rl.models.model import read_hf_config
from megatron_rl.quantization.engine_layout import quantization_config

WORKER_EXTENSION = "megatron_rl.engine.receiver.WorkerExtension"
VLLM_WORKER_EXTENSION = "megatron_rl.engine.vllm_receiver.WorkerExtension"
VLLM_BACKENDS = "checked_"  # + sync.transport: as vllm_receiver registers them


def write_engine_folder(hf_folder: Path, target: Path, config: Config) -> Path:
    """Write config.json with the quantized layout; token ids go in and out, so the tokenizer stays behind."""
    model = read_hf_config(hf_folder)
    if "quantization_config" in model:
        raise ValueError(
            f"model.path={hf_folder} is already quantized; give the BF16 model and set quantization.format"
        )
    quantization = quantization_config(
        config.quantization.format, config.quantization.ignore, config.quantization.kv_cache
    )
    if quantization is not None:
        model["quantization_config"] = quantization
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(model, indent=1))
    return target


def runs_on_gpu(config: Config) -> bool:
    return config.run.device == Device.cuda or (config.run.device == Device.auto and torch.cuda.is_available())


def max_sequence_tokens(config: Config) -> int:
    response = max(config.rollout.max_response_tokens, config.eval.max_response_tokens or 0)
    return config.rollout.max_prompt_tokens + response


def engine_arguments(config: Config, folder: Path, worker_extension: str = WORKER_EXTENSION) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`, plain data: they travel to the child process as a message."""
    backend = str(config.sync.transport.value)
    if config.sync.transport != Transport.file:  # vLLM's own engines, with our checks in front
        backend, worker_extension = VLLM_BACKENDS + backend, VLLM_WORKER_EXTENSION
    gpu = runs_on_gpu(config)
    longest = max_sequence_tokens(config)
    arguments: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling parameters come from the recipe alone
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": config.sampler.tensor_parallel,
        "max_model_len": longest,
        "max_num_seqs": config.sampler.max_sequences,
        "max_num_batched_tokens": max(longest, 4096),
        "seed": config.run.seed,
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": backend},
        "worker_extension_cls": worker_extension,
        # which tokens share a batch or a cached prefix changes BF16 rounding; hosts favour exact repetition
        "enable_prefix_caching": gpu,
        "enforce_eager": not gpu,
        # a seeded request whose prompt is cut in two asks its generator for an offset, which only CUDA's have
        "enable_chunked_prefill": gpu,
    }
    if config.quantization.kv_cache == KvCache.fp8:
        arguments["kv_cache_dtype"] = "fp8"
    if gpu:
        arguments["enable_sleep_mode"] = True
    else:
        arguments["kv_cache_memory_bytes"] = int(config.sampler.memory_gib * (1 << 30))
    if config.sampler.tensor_parallel > 1:
        arguments["distributed_executor_backend"] = "mp"
    return arguments | config.sampler.vllm
