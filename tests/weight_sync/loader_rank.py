"""Sampler rank (of two) without an engine: vLLM's layers and loaders load what a learner wrote.

Returned per case: the parameters that differ from the rank's share of the original tensors, how
many were compared, and the bytes that were read, of how many in all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from simulated import assert_same_bits, hf_config, quantized_whole, random_hf, run_sources
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from megatron_rl.config.schema import Format, QuantizationSection
from megatron_rl.engine.expectation import expected_tensors
from megatron_rl.models.layout import Layout
from megatron_rl.models.shape import ModelShape
from megatron_rl.sampler.engine_settings import write_engine_folder
from megatron_rl.weight_sync import engine_shards
from megatron_rl.weight_sync.engine_shards import Shard, ShardBuffer
from megatron_rl.weight_sync.file_reader import stage
from megatron_rl.weight_sync.file_transport import write_version

RANKS = 2
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# rows of each kind: twice as many queries as keys
JOINED = {
    "qkv_proj": (2, 1, 1),
    "gate_up_proj": (1, 1),
}
PER_COLUMN = ("o_proj", "down_proj", "w2")  # cut along the inputs
# the experts of a layer stand in one parameter
EXPERTS = {
    "qwen3_moe": {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)},
    "mixtral": {"w13": ("w1", "w3"), "w2": ("w2",)},
}


def model_config(case: dict[str, Any]) -> dict[str, Any]:
    family = case["family"]
    changes = {
        "architectures": [ARCHITECTURES[family]],
        "tie_word_embeddings": case["tied"],
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    if case["format"] == "fp8_block":
        changes |= {"head_dim": 128, "hidden_size": 256, "intermediate_size": 512}
    if "num_key_value_heads" in case:
        changes["num_key_value_heads"] = case["num_key_value_heads"]
    if family == "qwen2":
        changes["head_dim"] = 8  # vLLM does not read it for this family, but divides
    if family in EXPERTS:
        changes |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return hf_config(family, **changes)


def share(
    whole: dict[str, torch.Tensor], name: str, rank: int, copied: bool = False
) -> torch.Tensor:
    """This rank's part of an engine parameter, by the rules of tensor parallelism. `copied`: keys
    and values.
    """
    *parents, module, suffix = name.split(".")
    if suffix.startswith(("w13_", "w2_")):
        return experts_share(whole, name, rank)
    if module in JOINED and name in whole:  # in the checkpoint, too: each kind has its own shares
        kinds = JOINED[module]
        full = whole[name]
        rows = [len(full) * part // sum(kinds) for part in kinds]
        return torch.cat([kind.chunk(RANKS)[rank] for kind in full.split(rows)])
    parts = []
    for each in FUSED.get(module, (module,)):
        full = whole[".".join([*parents, each, suffix])]
        if module in ("embed_tokens", "lm_head"):  # padded to a multiple of 64 rows per model
            full = torch.cat([full, full.new_zeros(-len(full) % 64, full.shape[1])])
        alike = (
            "norm" in module
            or module == "gate"
            or (copied and each in ("k_proj", "v_proj"))
            or (module in PER_COLUMN and suffix == "weight_scale" and full.shape[1] == 1)
        )
        dim = 1 if module in PER_COLUMN else 0
        parts.append(full if alike else full.chunk(RANKS, dim)[rank])
    return torch.cat(parts)


def experts_share(whole: dict[str, torch.Tensor], name: str, rank: int) -> torch.Tensor:
    stem, _, rest = name.partition(".experts.")
    kind, _, suffix = rest.rpartition(".")[2].partition("_")
    family = "mixtral" if "block_sparse_moe" in name else "qwen3_moe"
    experts = []
    while f"{stem}.experts.{len(experts)}.{EXPERTS[family][kind][0]}.{suffix}" in whole:
        prefix = f"{stem}.experts.{len(experts)}"
        parts = [whole[f"{prefix}.{each}.{suffix}"] for each in EXPERTS[family][kind]]
        if kind == "w13" or suffix == "weight":
            parts = [full.chunk(RANKS, 1 if kind == "w2" else 0)[rank] for full in parts]
        experts.append(torch.cat(parts))
    return torch.stack(experts)


def load(case: dict[str, Any], rank: int, rendezvous: str) -> dict[str, Any]:
    folder = Path(rendezvous).with_name(f"files{rank}")
    folder.mkdir(exist_ok=True)
    format = Format(case["format"])
    config = model_config(case)
    shape = ModelShape.from_hf(config)
    hf = random_hf(shape)
    sources, yielded = run_sources(
        hf,
        shape,
        Layout(tp=2),
        format,
        ignore=("lm_head",),
    )
    (folder / "config.json").write_text(json.dumps(config))
    engine = write_engine_folder(folder, folder / "engine", QuantizationSection(format=format))
    arguments = EngineArgs(
        str(engine),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=64,
        tensor_parallel_size=RANKS,
        distributed_executor_backend="mp",
        enforce_eager=True,
    )
    vllm_config = arguments.create_engine_config()
    with set_current_vllm_config(vllm_config), set_default_torch_dtype(torch.bfloat16):
        join(rank, rendezvous)
        try:
            model = initialize_model(vllm_config)
        except ValueError as error:
            if "Failed to find a kernel" in str(error):  # blocks need AMX or a GPU
                return {"skip": str(error)}
            raise
        cuts = {name: cut for source in sources for name, cut in source.cuts(RANKS).items()}
        sent = [pair for of_rank in yielded for pair in of_rank]
        whole_bytes = write_version(folder, 0, sent, format=format, cuts=cuts).nbytes
        expected, shards = expected_tensors(model, case["tied"])
        read = stage(folder, 0, 1, expected, -1, shards)
        held = ShardBuffer.of(Poisoned(read.tensors, shards), shards)
        model.load_weights(held.items())
    whole = quantized_whole(hf, format)
    wrong = []
    # the attention's own scales belong to its cache, which no update carries
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if ".attn." not in name
    }
    for name, parameter in parameters.items():
        want = share(whole, name, rank, copied=case.get("num_key_value_heads") == 1)
        try:
            assert_same_bits([(name, parameter.data)], {name: want})
        except AssertionError as error:
            wrong.append(str(error))
    return {"wrong": wrong, "compared": len(parameters), "read": read.nbytes, "of": whole_bytes}


class Poisoned(Mapping[str, torch.Tensor]):
    """Tensors as read, with other values in the parts that this rank claims not to load."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]) -> None:
        self._tensors = tensors
        self._shards = shards

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        poisoned = torch.full(tensor.shape, 77.0).to(tensor.dtype)
        for start, length in self._shards[name].runs or ():
            dim = self._shards[name].dim
            poisoned.narrow(dim, start, length).copy_(tensor.narrow(dim, start, length))
        return tensor if self._shards[name].runs is None else poisoned

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def join(rank: int, rendezvous: str) -> None:
    if not torch.distributed.is_initialized():
        init_distributed_environment(RANKS, rank, f"file://{rendezvous}", rank, "gloo")
        initialize_model_parallel(RANKS, backend="gloo")


def run_rank(rank: int, rendezvous: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    engine_shards.SMALL = 1  # the smallest tensors are cut, too
    # names that differ keep vLLM from sharing memory between the two, which would outlive them
    os.environ |= {"VLLM_DIST_IDENT": f"shards{rank}", "GLOO_SOCKET_IFNAME": "lo"}
    return [load(case, rank, rendezvous) for case in cases]
