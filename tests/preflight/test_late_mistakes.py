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

MISTAKES = [
    ("sampler.vllm.foo=1", "sampler.vllm.foo: vLLM's EngineArgs has no such field"),
    (
        "sampler.vllm.gpu_memory_utilisation=0.5",
        "did you mean sampler.vllm.gpu_memory_utilization?",
    ),
    (
        "sampler.vllm.max_num_seqs=banana",
        "sampler.vllm.max_num_seqs is banana: give a finite number",
    ),
    (
        "sampler.vllm.max_num_seqs=0",
        "sampler.vllm.max_num_seqs: 0, expected a whole number of 1 or more",
    ),
    ("sampler.vllm.max_num_seqs=1.5", "sampler.vllm.max_num_seqs: 1.5, expected a whole number"),
    ("sampler.vllm.kv_cache_memory_bytes=-1", "sampler.vllm.kv_cache_memory_bytes: -1, expected"),
    ("sampler.vllm.kv_cache_memory_bytes=1000000000000000", "this machine has"),
    (
        "sampler.vllm.gpu_memory_utilization=3",
        "sampler.vllm.gpu_memory_utilization: 3, expected a share",
    ),
    (
        "sampler.vllm.enforce_eager=banana",
        "sampler.vllm.enforce_eager is 'banana': use true or false",
    ),
    ("sampler.vllm.block_size=[16]", "sampler.vllm.block_size is [16]: use a whole number"),
    (
        "sampler.vllm.max_model_len=5",
        "sampler.vllm.max_model_len: 5, but prompt and answer take 20 tokens",
    ),
    ("sampler.vllm.foo=null", "sampler.vllm.foo: vLLM's EngineArgs has no such field"),
    ("sampler.vllm.5=5", "sampler.vllm.5: vLLM's EngineArgs has no such field"),
    ("sampler.start_timeout_s=-5", "sampler.start_timeout_s: -5, expected seconds: above 0"),
    ("sampler.start_timeout_s=.inf", "sampler.start_timeout_s is inf: give a finite number"),
    ("sampler.request_timeout_s=0", "sampler.request_timeout_s: 0, expected seconds: above 0"),
    ("reward.timeout_s=1e12", "reward.timeout_s: 1e+12, expected seconds"),
    ("sampler.engines=1000000000", "sampler.engines: 1e+09, expected 1"),
    (
        "learner.megatron.hidden_dropout=banana",
        "learner.megatron.hidden_dropout is banana: give a finite number",
    ),
    (
        "learner.megatron.hidden_dropout=1",
        "learner.megatron.hidden_dropout: 1, expected 0 (off) to below 1",
    ),
    ("learner.megatron.attention_dropout=.nan", "learner.megatron.attention_dropout is nan"),
    (
        "learner.megatron.num_layers=7",
        "learner.megatron.num_layers: follows from the model's config.json",
    ),
    (
        "learner.megatron.layernorm_epsilon=1",
        "learner.megatron.layernorm_epsilon: follows from the model's",
    ),
    (
        "learner.megatron.softmax_scale=1",
        "learner.megatron.softmax_scale: follows from the model's",
    ),
    (
        "learner.megatron.recompute_granularity=ful",
        "recompute_granularity is 'ful': use one of full, selective",
    ),
    (
        "learner.megatron.sequence_parallel=2",
        "learner.megatron.sequence_parallel is 2: use true or false",
    ),
    (
        "learner.megatron.timers=x",
        "learner.megatron.timers is 'x': no recipe can write such a value",
    ),
    (
        "learner.megatron.virtual_pipeline_model_parallel_size=x",
        "virtual_pipeline_model_parallel_size is x",
    ),
    (
        "learner.megatron.expert_tensor_parallel_size=0",
        "expert_tensor_parallel_size: 0, expected a whole number",
    ),
    (
        "learner.megatron.num_layers_in_first_pipeline_stage=-1",
        "num_layers_in_first_pipeline_stage: -1",
    ),
    ("optim.megatron.adam_beta1=2", "optim.megatron.adam_beta1: 2, expected 0 (off) to below 1"),
    ("optim.megatron.adam_beta2=-0.1", "optim.megatron.adam_beta2: -0.1, expected"),
    ("optim.megatron.adam_eps=-1", "optim.megatron.adam_eps: -1, expected above 0"),
    ("optim.megatron.adam_eps=0", "optim.megatron.adam_eps: 0, expected above 0"),
    ("optim.megatron.weight_decay=-1", "optim.megatron.weight_decay: -1, expected 0 or more"),
    (
        "optim.megatron.weight_decay=.inf",
        "optim.megatron.weight_decay is inf: give a finite number",
    ),
    ("optim.megatron.clip_grad=x", "optim.megatron.clip_grad is x: give a finite number"),
    ("optim.megatron.loss_scale=x", "optim.megatron.loss_scale is 'x': use a number"),
    ("optim.megatron.beta1=0.9", "optim.megatron.beta1: megatron-core's OptimizerConfig or"),
    ("optim.megatron.overlap_grad_reducs=true", "did you mean optim.megatron.overlap_grad_reduce?"),
    (
        "optim.megatron.overlap_grad_reduce=2",
        "optim.megatron.overlap_grad_reduce is 2: use true or false",
    ),
    (
        "optim.megatron.bucket_size=0",
        "optim.megatron.bucket_size: 0, expected a whole number of 1 or more",
    ),
    ("optim.megatron.grad_reduce_in_fp32=false", "optim.megatron.grad_reduce_in_fp32: "),
    ("optim.megatron.use_distributed_optimizer=false", "use_distributed_optimizer: "),
    ("learner.megatron.cuda_graph_impl=local", "learner.megatron.cuda_graph_impl: "),
    ("optim.lr=.inf", "optim.lr is inf: give a finite number"),
    ("optim.min_lr=1", "optim.min_lr: 1 is above optim.lr: 0.001"),
    ("optim.min_lr=-1", "optim.min_lr: -1, expected 0 or more"),
    (
        "run.seed=99999999999999999999",
        "run.seed is 99999999999999999999: give a whole number of at most 4294967295",
    ),
    ("run.seed=4294967296", "run.seed is 4294967296: give a whole number"),
    (
        "run.steps=1000000000000000000000000",
        "run.steps is 1000000000000000000000000: give a whole number",
    ),
    ("rollout.temperature=1e9", "rollout.temperature: 1e+09, expected 0.01 to 2"),
    ("rollout.temperature=0.001", "rollout.temperature: 0.001, expected 0.01 to 2"),
    ("rollout.samples_per_prompt=4000000000", "rollout.samples_per_prompt: 4e+09, expected"),
    ("sync.probe_budget=-1", "sync.probe_budget is -1: use auto, or nats above 0"),
    ("sync.probe_budget=measured", "sync.probe_budget is measured: use auto, or nats above 0"),
    ("sync.probe_budget=.inf", "sync.probe_budget is inf: use auto, or nats above 0"),
    ("model.head_precision=fp16", "model.head_precision is fp16: use one of bf16, fp32"),
    (
        "sampler.vllm.hf_overrides.head_dtype=float32",
        "sampler.vllm.hf_overrides.head_dtype: model.head_precision sets",
    ),
    ("log.record_every=-1", "log.record_every: -1, expected 0 or more"),
    (
        "quantization.ignore=['re:(']",
        "quantization.ignore is ['re:(']: what follows re: must be a regular expression",
    ),
    ("quantization.ignore=[foo]", "quantization.ignore: 'foo' matches no layer of this model"),
    (
        "quantization.ignore=['re:.*experts.*']",
        "quantization.ignore: 're:.*experts.*' matches no layer",
    ),
    (
        "quantization.ignore=[model.layers.0.mlp.down_prj]",
        "did you mean model.layers.0.mlp.down_proj?",
    ),
    (
        "run.stop=null; run.stop.eval/acc=0.5",
        "no run logs eval/acc; use one of eval/accuracy, eval/reward_mean",
    ),
    ("run.stop={eval/accuracy: 28}", "run.stop: eval/accuracy is a fraction and never reaches 28"),
    ("reward.workers=10000", "reward.workers: 10000, expected 1 or more, at most 1024"),
    ("learner.data_parallel=60000", "learner: 120000 ranks take about"),
    ("learner.data_parallel=2000000000", "learner.data_parallel: 2e+09, expected"),
    (
        "rollout.prompts_per_step=20000",
        "rollout.prompts_per_step: 20000, but data/toy/train.jsonl has 9744 prompts",
    ),
]


@pytest.mark.fault(
    "a recipe holds a value that cannot work",
    "the dry run names the key, the value and the way out",
)
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("override", "said"), MISTAKES, ids=[mistake[0] for mistake in MISTAKES])
def test_late_mistakes(command: Command, override: str, said: str) -> None:
    (found,) = command.refused(*override.split("; ")).splitlines()
    assert said in found


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
    """What is read from source is what the classes have; vLLM's own import takes seconds, so its
    file stands for it.
    """
    from dataclasses import fields

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    configs = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    for files, real in zip((_TRANSFORMER, _OPTIMIZER, _REPLICAS), configs, strict=True):
        read = foreign.fields_of("megatron.core", files, _CLASSES)
        assert {
            field.name for field in fields(real) if not field.name.startswith("_")
        } <= read.keys()
    assert (
        foreign.fields_of("megatron.core", _OPTIMIZER + _REPLICAS, _CLASSES).keys()
        >= _OPTIMIZER_OWNED
    )
    arguments = foreign.fields_of("vllm", ("engine/arg_utils.py",), ("EngineArgs",))
    assert {
        "max_num_seqs",
        "kv_cache_memory_bytes",
        "hf_overrides",
        "enable_return_routed_experts",
    } <= arguments.keys()
    assert foreign.fields_of("no_such_package", (), ()) is None
