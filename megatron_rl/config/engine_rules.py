"""Rules that load.py applies to recipe keys of engines: formats, GPUs, vLLM arguments, transport,
servers' addresses and key; and to the learner's that depend on them: as_sampler, router.
"""

import os
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from megatron_rl.config.choices import Device, Format, Forward, Router, Transport
from megatron_rl.config.fleet import (
    KEY_VARIABLE,
    devices,
    distant,
    replica_formats,
    uses_servers,
    without_secret,
)
from megatron_rl.config.objective import LearnerSection
from megatron_rl.config.sampling import (
    QuantizationSection,
    RolloutSection,
    SamplerSection,
    SyncSection,
)
from megatron_rl.config.schema import RunSection

SHORTEST_KEY = 16
# what the sampler decides itself; `sampler.vllm` may set anything else
OWNED_ARGUMENTS = frozenset(
    {
        "model",
        "quantization",
        "load_format",
        "logprobs_mode",
        "max_logprobs",
        "return_sampling_mask",
        "skip_tokenizer_init",
        "generation_config",
        "tensor_parallel_size",
        "weight_transfer_config",
        "worker_extension_cls",
        "api_key",
        "host",
        "port",
        "uds",
        "middleware",
        "tokens_only",
        "root_path",
    }
)
SPECULATIVE = frozenset({"speculative_config", "spec_method", "spec_model", "spec_tokens"})


def formats(quantization: QuantizationSection, sampler: SamplerSection) -> Iterator[str]:
    smoothing = quantization.smoothing
    if smoothing and quantization.format != Format.int8:
        yield (
            f"quantization.smoothing: {smoothing:g} with "
            f"quantization.format={quantization.format}; only int8 gains from it: set "
            "quantization.format=int8, or quantization.smoothing=null"
        )
    if sampler.tensor_parallel > 1 and Format.fp8_block in replica_formats(sampler, quantization):
        yield "sampler.tensor_parallel: 128x128 blocks over several sampler ranks are not built yet; use 1"


def as_sampler(
    learner: LearnerSection,
    quantization: QuantizationSection,
    sampler: SamplerSection,
    run: RunSection,
) -> Iterator[str]:
    if learner.forward is not Forward.as_sampler:
        return
    formats = sorted({*replica_formats(sampler, quantization), quantization.format})
    if len(formats) > 1:
        yield f"learner.forward: as_sampler follows one format, the engines have {', '.join(formats)}; use bf16"
    elif formats[0] == Format.fp8_block:
        yield "learner.forward: as_sampler with quantization.format=fp8_block: built for int8 and fp8 so far; use bf16"
    ours = learner.tensor_parallel
    theirs = sampler.tensor_parallel
    if ours % theirs and theirs % ours:
        yield (
            f"learner.forward: as_sampler with learner.tensor_parallel={ours} and "
            f"sampler.tensor_parallel={theirs}: one has to divide the other; use bf16, or change "
            "one of them"
        )
    if run.device is Device.cuda:
        yield "learner.forward: as_sampler is CPU-only so far; use bf16 with run.device=cuda"


def router(learner: LearnerSection, rollout: RolloutSection) -> Iterator[str]:
    if learner.router is Router.own:
        return
    if rollout.supervised:
        yield f"learner.router: {learner.router}: the data set's own answers come from no sampler; use own"
    if learner.megatron.get("moe_aux_loss_coeff"):
        yield (
            f"learner.router: {learner.router} with learner.megatron.moe_aux_loss_coeff: a balance "
            "loss counts the routers' own choices, which replay does not use; use 0"
        )
    if learner.megatron.get("moe_router_fusion"):
        yield (
            f"learner.router: {learner.router} with learner.megatron.moe_router_fusion, which "
            "bypasses replay; use false"
        )


def patches(sync: SyncSection) -> Iterator[str]:
    if sync.full_every > 1 and sync.transport != Transport.file:
        yield (
            f"sync.full_every: {sync.full_every} with sync.transport={sync.transport}; patches "
            "travel as files only: use file, or 1 for whole versions"
        )


def engine(sampler: SamplerSection) -> Iterator[str]:
    numbers = [number for gpus in devices(sampler) for number in gpus.split(",")]
    wanted = sampler.engines * sampler.tensor_parallel
    if not all(map(str.isdecimal, numbers)) or len(set(numbers)) != len(numbers):
        yield f"sampler.devices: {sampler.devices!r}, expected numbers of GPUs such as '4,5', each once"
    elif numbers and uses_servers(sampler):
        yield "sampler.devices: names GPUs of engines that a run starts, and these are servers; remove it"
    elif numbers and len(numbers) != wanted:
        yield (
            f"sampler.devices: {','.join(numbers)} are {len(numbers)} GPUs for "
            f"sampler.engines={sampler.engines} of "
            f"sampler.tensor_parallel={sampler.tensor_parallel}; name {wanted}"
        )
    overrides = sampler.vllm.get("hf_overrides")
    if isinstance(overrides, Mapping) and "head_dtype" in overrides:
        yield "sampler.vllm.hf_overrides.head_dtype: model.head_precision sets it, in the learner too; remove it"
    for name in sorted(SPECULATIVE & set(sampler.vllm)):
        yield (
            f"sampler.vllm.{name}: speculative decoding is not supported: weight updates do not "
            "reach draft models, and logprobs of accepted drafts are not verified; remove it"
        )
    for name in sorted(OWNED_ARGUMENTS & set(sampler.vllm)):
        yield f"sampler.vllm.{name}: is set by the sampler itself; remove it"


def addresses(sampler: SamplerSection) -> list[str]:
    """Yield errors in `sampler.addresses`, and in the key that servers need."""
    found = [
        f"sampler.addresses: {without_secret(address)!r}: {problem}; write it like http://node7:8000"
        for address in sampler.addresses
        if (problem := _address_problem(address))
    ]
    if len(set(sampler.addresses)) < len(sampler.addresses):
        found.append(f"sampler.addresses: {sampler.addresses} names a server twice; give each once")
    key = os.environ.get(KEY_VARIABLE, "")
    elsewhere = distant(sampler)
    if elsewhere and not key:
        found.append(
            f"sampler.addresses: {elsewhere[0]} is not on this machine, and {KEY_VARIABLE} "
            "is not set: any client that reaches the server could replace its weights. "
            "Start the servers with a key and export it under that name"
        )
    weak = len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key
    if sampler.addresses and key and weak:  # no other server is reached with this key
        found.append(
            f"sampler.addresses: the key in {KEY_VARIABLE} has {len(key)} characters, "
            f"expected at least {SHORTEST_KEY} printable ones without spaces; `openssl rand -hex "
            "32` makes one"
        )
    return found


def servers(sampler: SamplerSection, sync: SyncSection) -> Iterator[str]:
    """Yield the other errors in keys of several engines that do not depend on the machine."""
    if sampler.addresses and len(sampler.addresses) != sampler.engines:
        yield (
            f"sampler.engines: {sampler.engines} for {len(sampler.addresses)} sampler.addresses; "
            f"set sampler.engines={len(sampler.addresses)}"
        )
    if sampler.formats and len(sampler.formats) != sampler.engines:
        yield (
            f"sampler.formats: {len(sampler.formats)} formats for {sampler.engines} engines; give "
            "one for each, or none to run quantization.format everywhere"
        )
    if sync.transport != Transport.file and len(set(sampler.formats)) > 1:
        yield (
            f"sampler.formats: {sampler.formats} with sync.transport={sync.transport}, which "
            "sends the same bytes to every engine; name one format, or use sync.transport=file"
        )
    if sync.transport == Transport.ipc and uses_servers(sampler):
        yield (
            "sync.transport: ipc shares memory within one machine, and the servers of "
            "sampler.addresses are not the run's own; use nccl or file"
        )


def _address_problem(address: str) -> str | None:
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https"):
        return "the scheme is neither http nor https"
    if not parts.hostname or port is None:
        return "host or port is missing"
    if parts.username or parts.password:
        return f"keys do not belong in an address ({KEY_VARIABLE} of the environment holds them)"
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        return "there is something behind the port"
    return None


RULES = (formats, as_sampler, router, patches, engine, addresses, servers)
