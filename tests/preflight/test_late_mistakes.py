"""Mistakes that used to be found after engines had started, or never: the dry run names the key and
the way out.
"""

import pytest
from helpers import Command

from megatron_rl.config import foreign
from megatron_rl.learner.modules.limits import (
    _CLASSES,
    _OPTIMIZER,
    _OPTIMIZER_OWNED,
    _REPLICAS,
    _TRANSFORMER,
)

# an override, and a word of its refusal beside the key
MISTAKES = {
    "sampler.vllm.foo=null": "EngineArgs",
    "sampler.vllm.gpu_memory_utilisation=0.5": "sampler.vllm.gpu_memory_utilization?",
    "sampler.vllm.max_num_seqs=banana": "banana",
    "sampler.vllm.max_num_seqs=0": "1 or more",
    "sampler.vllm.kv_cache_memory_bytes=1000000000000000": "this machine has",
    "sampler.vllm.gpu_memory_utilization=3": "share",
    "sampler.vllm.max_model_len=5": "20 tokens",
    "sampler.vllm.hf_overrides.head_dtype=float32": "model.head_precision",
    "sampler.vllm.speculative_config={method: ngram}": "weight updates do not reach",
    "sampler.start_timeout_s=.inf": "inf",
    "sampler.engines=1000000000": "at most",
    "learner.megatron.hidden_dropout=banana": "banana",
    "learner.megatron.hidden_dropout=1": "below 1",
    "learner.megatron.num_layers=7": "config.json",
    "learner.megatron.num_layers_in_first_pipeline_stage=-1": "-1",
    "learner.megatron.cuda_graph_impl=local": "",
    "learner.data_parallel=60000": "120000 ranks",
    "optim.megatron.adam_beta1=2": "below 1",
    "optim.megatron.adam_eps=0": "above 0",
    "optim.megatron.beta1=0.9": "OptimizerConfig",
    "optim.megatron.overlap_grad_reducs=true": "optim.megatron.overlap_grad_reduce?",
    "optim.megatron.bucket_size=0": "1 or more",
    "optim.megatron.grad_reduce_in_fp32=false": "",
    "optim.megatron.use_distributed_optimizer=false": "",
    "optim.lr=.inf": "inf",
    "optim.min_lr=1": "optim.lr",
    "run.seed=4294967296": "4294967296",
    "run.stop=null; run.stop.eval/acc=0.5": "eval/accuracy",
    "run.stop={eval/accuracy: 28}": "28",
    "rollout.temperature=1e9": "0.01 to 2",
    "rollout.prompts_per_step=20000": "9744 prompts",
    "sync.probe_budget=measured": "auto",
    "model.head_precision=fp16": "fp32",
    "quantization.ignore=['re:(']": "regular expression",
    "quantization.ignore=['re:.*experts.*']": "matches no layer",
    "quantization.ignore=[model.layers.0.mlp.down_prj]": "model.layers.0.mlp.down_proj?",
    "reward.workers=10000": "1024",
}


@pytest.mark.fault(
    "a recipe holds a value that cannot work",
    "the dry run names the key, the value and the way out",
)
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("override", MISTAKES)
def test_late_mistakes(command: Command, override: str) -> None:
    key = override.partition("=")[0]
    (found,) = command.refused(*override.split("; ")).splitlines()
    assert key.rpartition(".")[2] in found
    assert MISTAKES[override] in found


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    "override",
    [
        "sampler.vllm={enforce_eager: true, block_size: 16, gpu_memory_utilization: null, dtype: "
        "auto}",
        "sampler.vllm={limit_mm_per_prompt: {image: 0}, cudagraph_capture_sizes: [1, 2], "
        "compilation_config: {a: 0}}",
        "learner.megatron={recompute_modules: [core_attn], recompute_granularity: selective, "
        "hidden_dropout: 0}",
        "learner.megatron={deterministic_mode: true, attention_softmax_in_fp32: true, "
        "cpu_offloading_num_layers: 0}",
        "optim.megatron={adam_beta1: 0, adam_eps: 1e-15, decoupled_weight_decay: false, "
        "loss_scale: null}",
        "optim.megatron={overlap_grad_reduce: true, bucket_size: 1000000, "
        "pad_buckets_for_high_nccl_busbw: true}",
        "quantization.ignore=[lm_head, 're:.*down_proj', model.layers.1.self_attn.q_proj]",
        "run.seed=4294967295",
        "run.stop=null; run.stop.eval/reward_mean=3",
    ],
)
def test_what_may_be_handed_over(command: Command, override: str) -> None:
    command.dry_run(*override.split("; "))


def test_the_sources_are_the_packages() -> None:
    """Fields read from source are those of the classes; vLLM is read alone, as its import takes
    seconds.
    """
    from dataclasses import fields

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    configs = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    for files, real in zip((_TRANSFORMER, _OPTIMIZER, _REPLICAS), configs, strict=True):
        read = foreign.fields_of("megatron.core", files, _CLASSES)
        assert {field.name for field in fields(real) if not field.name.startswith("_")} <= read
    assert foreign.fields_of("megatron.core", _OPTIMIZER + _REPLICAS, _CLASSES) >= _OPTIMIZER_OWNED
    arguments = foreign.fields_of("vllm", ("engine/arg_utils.py",), ("EngineArgs",))
    assert {
        "max_num_seqs",
        "kv_cache_memory_bytes",
        "hf_overrides",
        "enable_return_routed_experts",
    } <= arguments
    assert foreign.fields_of("no_such_package", (), ()) is None
