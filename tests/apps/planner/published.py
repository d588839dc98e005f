"""Published configurations of megatron-core learners, with their results.

Taken as they are given; what is not given has megatron-core's default. Context-parallel
ranks share what data-parallel ranks do, and a sequence: they stand here as data-parallel ranks on a
part of the sequence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.apps.planner.case import Case
from megatron_rl.apps.planner.plan import Plan, plan
from megatron_rl.config import from_mapping
from megatron_rl.config.plain_yaml import CONF
from megatron_rl.config.schema import Config
from megatron_rl.preflight.machine import named

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SP = {"sequence_parallel": True}
ETP1 = {"expert_tensor_parallel_size": 1}
INTERLEAVED = {
    **SP,
    "virtual_pipeline_model_parallel_size": 5,
    "bias_activation_fusion": True,
}
OF_235B = {
    **FULL,
    **SP,
    **ETP1,
    "num_layers_in_first_pipeline_stage": 11,
    "num_layers_in_last_pipeline_stage": 11,
}

LLAMA_2_7B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
QWEN2_5_14B = {
    "model_type": "qwen2",
    "num_hidden_layers": 48,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 13824,
    "vocab_size": 152064,
    "rope_theta": 1e6,
}
OTHERS = {"Llama-2-7B": LLAMA_2_7B, "Qwen2.5-14B": QWEN2_5_14B}


@dataclass(frozen=True)
class Published:
    model: str
    machine: str
    learner: dict[str, Any]
    tokens: int  # of a micro-batch
    rows: int = 64  # of an update
    gib: float | None = None  # measured
    engine: float | None = None  # share of the memory of an engine on the same GPUs
    reference: bool = False
    megatron: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        sampler: dict[str, Any] = {"addresses": ["http://127.0.0.1:8000"]}
        if self.engine:
            sampler = {
                "devices": "0",
                "sleep": "discard",
                "vllm": {"gpu_memory_utilization": self.engine},
            }
        return from_mapping(
            {
                "rollout": {
                    "max_prompt_tokens": 1,
                    "max_response_tokens": self.tokens - 1,
                    "prompts_per_step": self.rows // 2,
                    "samples_per_prompt": 2,
                },
                "learner": {
                    **self.learner,
                    "tokens_per_microbatch": self.tokens,
                    "megatron": self.megatron,
                },
                "loss": {"kl_coef": 0.001 if self.reference else 0.0},
                "sampler": sampler,
            }
        )

    @property
    def hf_config(self) -> dict[str, Any]:
        return OTHERS.get(self.model) or json.loads(
            (CONF / "model" / f"{self.model}.json").read_text()
        )

    @property
    def plan(self) -> Plan:
        return plan(Case(self.config, self.hf_config, named(self.machine)))


def ranks(tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1) -> dict[str, Any]:
    return {
        "tensor_parallel": tp,
        "pipeline_parallel": pp,
        "data_parallel": dp,
        "expert_parallel": ep,
    }


def llama_70b(tp: int, pp: int, gib: float, dp: int = 1) -> Published:
    """NVIDIA-NeMo/Megatron-Bridge, skills/perf-memory-tuning/SKILL.md and pull request 3107."""
    layout = ranks(tp=tp, pp=pp, dp=dp)
    return Published(
        "Llama-3.1-70B-Instruct", "4x8xH100", layout, 4096, 32, gib=gib, megatron=INTERLEAVED
    )


def qwen_7b(tp: int, engine: float, tokens: int = 10240, **more: Any) -> Published:
    """ISEEKYAN/verl_megatron_practice, grpo_qwen2.5_7b.csv: an engine on the learner's GPUs."""
    return Published(
        "Qwen2.5-7B",
        "1x8xH100",
        ranks(tp=tp, dp=8 // tp),
        tokens,
        512,
        engine=engine,
        reference=True,
        megatron={**SP, **more},
    )


RAN = {
    # modelscope/ms-swift at 3602360, examples/megatron/: moe/qwen3_moe.sh
    "Qwen3-30B-A3B, PP2 EP8": Published(
        "Qwen3-30B-A3B", "2x8xA100", ranks(pp=2, dp=8, ep=8), 8192, 16, gib=60, megatron=FULL
    ),
    # mcore_bridge/full/moe.sh
    "Qwen3-30B-A3B, TP4 PP2 EP4": Published(
        "Qwen3-30B-A3B",
        "1x8xA100",
        ranks(tp=4, pp=2, ep=4),
        8192,
        4,
        gib=76,
        megatron={
            **FULL,
            **SP,
            **ETP1,
            "num_layers_in_first_pipeline_stage": 25,
        },
    ),
    # base_to_chat.sh
    "Qwen2.5-14B, TP4": Published(
        "Qwen2.5-14B",
        "1x8xA100",
        ranks(tp=4, dp=2),
        8192,
        16,
        gib=65,
        megatron={**SP, "recompute_granularity": "selective", "bias_activation_fusion": True},
    ),
    # dense/qwen3_32b.sh
    "Qwen3-32B, TP8": Published(
        "Qwen3-32B", "1x8xA100", ranks(tp=8), 8192, 16, gib=80, megatron={**FULL, **SP}
    ),
    "Llama-3-70B, TP4 PP4": llama_70b(4, 4, gib=58.8, dp=2),
    "Llama-3-70B, TP4 PP8": llama_70b(4, 8, gib=53.2),
    "Llama-3-70B, TP8 PP4": llama_70b(8, 4, gib=50.2),
    # NVIDIA-NeMo/RL, docs/about/performance-summary.md (v0.4)
    "Qwen3-30B-A3B, EP8": Published("Qwen3-30B-A3B", "4x8xH100", ranks(dp=32, ep=8), 4096, 512),
    "Qwen3-235B-A22B, TP2 CP2 PP8 EP16": Published(
        "Qwen3-235B-A22B",
        "16x8xH100",
        ranks(tp=2, pp=8, dp=8, ep=16),
        8192 // 2,
        512,
        megatron=OF_235B,
    ),
    "Qwen2.5-7B, TP4, an engine beside it": qwen_7b(4, engine=0.6),
}
DIED = {
    # NVIDIA/Megatron-LM, issue 606
    "Llama-2-7B, TP1": Published("Llama-2-7B", "1x8xA100-40", ranks(dp=8), 64, 8),
    "Qwen2.5-7B, TP2 CP2, an engine with 0.8": qwen_7b(2, engine=0.8, tokens=10240 // 2),
    "Qwen2.5-7B, TP2 CP2, an engine with 0.5": qwen_7b(2, engine=0.5, tokens=10240 // 2),
    "Qwen2.5-7B, TP2, an engine with 0.6": qwen_7b(2, engine=0.6),
    "Qwen2.5-7B, TP2, recomputed, an engine with 0.6": qwen_7b(2, engine=0.6, **FULL),
}
