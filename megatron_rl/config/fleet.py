"""Facts derived from a recipe's `sampler` section: where its engines are, GPUs of each engine that
the run starts, addresses off this machine, weight formats, sequences at once; and a phrase that
describes it.
"""

import ipaddress
from collections import Counter
from urllib.parse import urlsplit

from megatron_rl.config.choices import Format
from megatron_rl.config.sampling import QuantizationSection, SamplerSection

# of the environment: holds the key of servers given by address
KEY_VARIABLE = "MEGATRON_RL_FLEET_KEY"
MAX_SEQUENCES = 256  # sequences decoded at once, unless sampler.vllm.max_num_seqs is set
# KV cache of an engine without a GPU, unless sampler.vllm.kv_cache_memory_bytes is set
HOST_CACHE_BYTES = 1 << 30
LOOPBACK = "127.0.0.1"


def uses_servers(sampler: SamplerSection) -> bool:
    """Return True if the engines are servers that something else starts."""
    return sampler.dedicated_nodes or bool(sampler.addresses)


def own_engines(sampler: SamplerSection) -> int:
    """Number of engines that the run starts, on this machine."""
    if uses_servers(sampler):
        return 0
    return sampler.engines


def devices(sampler: SamplerSection) -> list[str]:
    """The GPUs of each engine, such as ["0,1", "2,3"]; empty where none are named."""
    given = sampler.devices
    if given is None or given == []:
        return []
    if not isinstance(given, list):
        given = [given]
    gpus = ",".join(map(str, given)).split(",")
    each = sampler.tensor_parallel
    if sampler.engines == 1:
        each = len(gpus)
    return [",".join(gpus[at : at + each]) for at in range(0, len(gpus), each)]


def gpus_of_engines(sampler: SamplerSection) -> set[int]:
    """Return the GPUs of all engines on this machine; invalid numbers are reported elsewhere."""
    given = devices(sampler)
    if given:
        return {int(device) for gpus in given for device in gpus.split(",") if device.isdecimal()}
    return set(range(own_engines(sampler) * sampler.tensor_parallel))


def replica_formats(
    sampler: SamplerSection, quantization: QuantizationSection
) -> tuple[Format, ...]:
    """The weight format of every engine."""
    return tuple(sampler.formats) or (quantization.format,) * sampler.engines


def local_formats(sampler: SamplerSection, quantization: QuantizationSection) -> tuple[Format, ...]:
    """Return the formats that run on this kind of machine; servers by address run elsewhere."""
    if sampler.addresses and not sampler.dedicated_nodes:
        return ()
    return replica_formats(sampler, quantization)


def distinct_formats(
    sampler: SamplerSection, quantization: QuantizationSection
) -> tuple[Format, ...]:
    """Return the distinct weight formats of the engines, in a fixed order."""
    wanted = set(replica_formats(sampler, quantization))
    return tuple(format for format in Format if format in wanted)


def max_sequences(sampler: SamplerSection) -> int:
    """Return the number of sequences that an engine decodes at once."""
    return int(sampler.vllm.get("max_num_seqs", MAX_SEQUENCES))


def describe_sampler(sampler: SamplerSection, quantization: QuantizationSection) -> str:
    formats = Counter(replica_formats(sampler, quantization))
    kind = "server" if uses_servers(sampler) else "engine"
    count = ""
    if sampler.engines > 1:
        count = f"{sampler.engines} {kind}s of "
    named = f"format {next(iter(formats))}"
    if len(formats) > 1:
        named = "formats " + ", ".join(f"{format} x{count}" for format, count in formats.items())
    return f"{count}vLLM, {named}, TP{sampler.tensor_parallel}"


def is_loopback(address: str) -> bool:
    try:
        host = urlsplit(address).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name, or no address at all
        return False


def distant(sampler: SamplerSection) -> list[str]:
    """Addresses off this machine, as messages may show them."""
    return [without_secret(address) for address in sampler.addresses if not is_loopback(address)]


def without_secret(address: str) -> str:
    return address.rpartition("@")[2]
