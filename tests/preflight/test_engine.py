"""Refusals before an engine starts, each with the key, the value and a way out."""

import pytest
from simulated import hf_config

from megatron_rl.config.rules import findings
from megatron_rl.config.sampling import TopLogprobsSection
from megatron_rl.config.schema import (
    Config,
    Device,
    Format,
    KvCache,
    LearnerSection,
    QuantizationSection,
    RolloutSection,
    Router,
    SamplerSection,
    Sleep,
    SyncSection,
    Transport,
)
from megatron_rl.models.shape import ModelShape
from megatron_rl.preflight.engine import EXPERTS_PATTERN, RULES, unwatchable
from megatron_rl.preflight.machine import Machine

HOST = Machine(Device.cpu, "CPU")
NODE = Machine(Device.cuda, "H100", 9.0, gpus=8)


def problems(
    config: Config, machine: Machine = NODE, family: str = "qwen3", **changes
) -> list[str]:
    shape = ModelShape.from_hf(hf_config(family, **changes))
    return list(findings(RULES, vars(config) | {"machine": machine, "shape": shape}))


def quantized(format: Format, *ignore: str) -> Config:
    return Config(quantization=QuantizationSection(format=format, ignore=["lm_head", *ignore]))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("format", [Format.int8, Format.fp8])
def test_quantized_experts_are_for_gpus(family, format):
    (found,) = problems(quantized(format), HOST, family)
    assert f"quantization.format: {format} experts have no kernel" in found
    assert repr(EXPERTS_PATTERN) in found
    assert problems(quantized(format, EXPERTS_PATTERN), HOST, family) == []
    assert problems(quantized(format), NODE, family) == []
    assert problems(quantized(format), HOST, "qwen3") == []


@pytest.mark.parametrize(
    "entry",
    [
        r"re:.*\.experts\.1\..*",
        r"re:.*\.experts\..*\.down_proj",
        "model.layers.2.mlp.experts.0.up_proj",
    ],
)
def test_experts_of_a_layer_are_quantized_together(entry):
    for machine in (HOST, NODE):
        (found,) = problems(quantized(Format.int8, entry), machine, "qwen3_moe")
        assert "quantization.ignore" in found
        assert "one kernel" in found


def test_routed_experts_require_the_prefix_cache_on_gpus():
    config = Config(
        sampler=SamplerSection(vllm={"enable_prefix_caching": False}),
        learner=LearnerSection(router=Router.replay),
    )
    (found,) = problems(config, NODE, "qwen3_moe")
    assert found.startswith("sampler.vllm.enable_prefix_caching: false")
    assert problems(config, HOST, "qwen3_moe") == []


def transport(
    name: Transport, learner: LearnerSection, machine: Machine = NODE, **sampler
) -> list[str]:
    config = Config(
        learner=learner, sampler=SamplerSection(**sampler), sync=SyncSection(transport=name)
    )
    return problems(config, machine)


def test_transports_of_vllm_need_a_gpu():
    for name in (Transport.ipc, Transport.nccl):
        (found,) = transport(name, LearnerSection(), HOST)
        assert found == f"sync.transport: {name} needs GPUs; use file"


def test_ipc_stays_on_the_learner_s_gpus_and_host():
    learner = LearnerSection(tensor_parallel=2, data_parallel=2)
    assert transport(Transport.ipc, learner, tensor_parallel=4) == []
    assert transport(Transport.ipc, learner, tensor_parallel=2, devices="2,3") == []
    (found,) = transport(Transport.ipc, learner, tensor_parallel=2, devices="3,4")
    assert "engine runs on 3,4" in found
    (found,) = transport(Transport.ipc, LearnerSection(tensor_parallel=8, data_parallel=2))
    assert "16 ranks" in found
    assert transport(Transport.ipc, learner, engines=2, devices="0,3") == []
    (found,) = transport(Transport.ipc, learner, engines=2, devices="0,4")
    assert "engine runs on 0,4" in found


def test_nccl_wants_gpus_of_its_own():
    learner = LearnerSection(tensor_parallel=2, data_parallel=2)
    (found,) = transport(Transport.nccl, learner, tensor_parallel=2)
    assert "both take 0,1" in found
    assert "sampler.devices='4,5'" in found
    found = transport(Transport.nccl, learner, engines=2, tensor_parallel=2, devices="2,3,4,5")
    assert any("both take 2,3" in one and "sampler.devices='4,5,6,7'" in one for one in found)
    assert transport(Transport.nccl, learner, tensor_parallel=2, devices="4,5") == []


def test_sleep():
    def asleep(sleep: Sleep, every: int = 1) -> Config:
        return Config(sampler=SamplerSection(sleep=sleep), sync=SyncSection(every=every))

    assert problems(asleep(Sleep.discard)) == []
    assert problems(asleep(Sleep.offload, 2)) == []
    (found,) = problems(asleep(Sleep.discard, 2))
    assert "sampler.sleep: discard with sync.every=2" in found
    (found,) = problems(asleep(Sleep.offload), HOST)
    assert found.startswith("sampler.sleep: offload")
    servers = SamplerSection(sleep=Sleep.offload, addresses=["http://127.0.0.1:8000"])
    (found,) = problems(Config(sampler=servers))
    assert found.startswith("sampler.sleep: offload")


def test_an_fp8_cache_is_for_gpus_that_know_fp8():
    config = Config(quantization=QuantizationSection(kv_cache=KvCache.fp8))
    assert problems(config) == []
    (found,) = problems(config, HOST)
    assert found.startswith("quantization.kv_cache: fp8 ")
    (found,) = problems(config, Machine(Device.cuda, "A100", 8.0, 8))
    assert "8.9, A100 has 8.0" in found


@pytest.mark.parametrize(
    ("machine", "learner", "sampler", "fits"),
    [
        (HOST, {}, {}, True),
        (NODE, {}, {}, False),
        (HOST, {}, {"tensor_parallel": 2}, False),
        (HOST, {}, {"dedicated_nodes": True}, False),
        (HOST, {}, {"vllm": {"enforce_eager": False}}, False),
        (HOST, {"tensor_parallel": 8}, {}, False),
    ],
)
def test_layers_are_compared_where_both_sides_show_them(machine, learner, sampler, fits):
    config = Config(learner=LearnerSection(**learner), sampler=SamplerSection(**sampler))
    shape = ModelShape.from_hf(hf_config("qwen3"))
    facts = vars(config) | {"machine": machine, "shape": shape}
    found = list(findings([unwatchable], facts))
    assert len(found) == (0 if fits else 1)


def test_filters_of_a_small_vocabulary():
    def found(top_k: int | None, servers: bool = False) -> list[str]:
        config = Config(
            rollout=RolloutSection(top_k=top_k), sampler=SamplerSection(dedicated_nodes=servers)
        )
        return problems(config, HOST, vocab_size=20)

    assert found(None, True) == []
    assert found(19) == []
    assert found(4, True) == []
    (large,) = found(20)
    assert "rollout.top_k: 20" in large
    (large,) = found(5, True)
    assert "use at most 4" in large


def test_top_logprobs_of_a_small_vocabulary():
    def found(most: int) -> list[str]:
        top = TopLogprobsSection(max=most)
        return problems(Config(rollout=RolloutSection(top_logprobs=top)), HOST, vocab_size=20)

    assert found(20) == []
    (large,) = found(21)
    assert "rollout.top_logprobs.max: 21" in large
    assert "use at most 20" in large


def test_several_embedded_engines(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)

    def several(engines: int, **sampler) -> Config:
        return Config(sampler=SamplerSection(engines=engines, **sampler))

    assert problems(several(1)) == []
    assert problems(several(4), HOST) == []
    assert problems(several(2, tensor_parallel=2), HOST) == []
    for many in (several(5), several(3, tensor_parallel=2)):
        (found,) = problems(many, HOST)
        assert found.startswith("sampler.engines: ")
    assert problems(several(2, tensor_parallel=2, devices="0,1,2,3")) == []
    (found,) = problems(several(2, tensor_parallel=2))
    assert found.startswith("sampler.devices: null")
    assert problems(several(5, dedicated_nodes=True), HOST) == []
