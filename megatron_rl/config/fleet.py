"""Facts derived from a recipe's `sampler` section: how many servers (0: embedded engines), GPUs of
each engine that the run starts, addresses off this machine, weight formats, sequences at once; and
a phrase that describes it.
"""

import ipaddress
from collections import Counter
from urllib.parse import urlsplit

from megatron_rl.config.choices import Format
from megatron_rl.config.sampling import QuantizationSection, SamplerSection

# of the environment: holds the key of servers given by address
KEY_VARIABLE = "MEGATRON_RL_FLEET_KEY"
MAX_SEQUENCES = 256  # decoded at once, where sampler.vllm.max_num_seqs names no other number
# of an engine without a GPU, where sampler.vllm.kv_cache_memory_bytes names no other
HOST_CACHE_BYTES = 1 << 30
LOOPBACK = "127.0.0.1"


def is_fleet(sampler: SamplerSection) -> bool:
    return bool(size(sampler))


def size(sampler: SamplerSection) -> int:
    """How many servers, those included whose addresses are not known yet; 0: engines are
    embedded.
    """
    return sampler.fleet.replicas + max(sampler.fleet.servers, len(sampler.fleet.addresses))


def devices(sampler: SamplerSection) -> list[str]:
    """The GPUs of each engine that the run starts, such as ["0,1", "2,3"]; empty where none are
    named.
    """
    given = sampler.devices
    if given is None or given == []:
        return []
    if isinstance(given, list):
        texts = [str(one) for one in given]
    else:
        texts = [str(given)]
    if is_fleet(sampler):
        return texts
    if sampler.engines == 1:
        return [",".join(texts)]
    gpus = ",".join(texts).split(",")
    each = sampler.tensor_parallel
    return [",".join(gpus[at : at + each]) for at in range(0, len(gpus), each)]


def gpus_of_engines(sampler: SamplerSection) -> set[int]:
    """The GPUs of every engine of this machine: what is no number is reported elsewhere."""
    given = devices(sampler)
    if given:
        return {int(device) for gpus in given for device in gpus.split(",") if device.isdecimal()}
    count = sampler.engines * sampler.tensor_parallel
    if sampler.fleet.replicas or not is_fleet(sampler):
        return set(range(count))
    return set()


def replica_formats(
    sampler: SamplerSection, quantization: QuantizationSection
) -> tuple[Format, ...]:
    """The weight format of every engine: the started servers, then the given ones; one for all
    embedded ones.
    """
    fleet = sampler.fleet
    if not is_fleet(sampler):
        return (quantization.format,)
    return tuple(fleet.formats) or (quantization.format,) * size(sampler)


def local_formats(sampler: SamplerSection, quantization: QuantizationSection) -> tuple[Format, ...]:
    """Those that machines of this kind have to run: servers that are given by address have machines
    of their own.
    """
    formats = replica_formats(sampler, quantization)
    if is_fleet(sampler):
        return formats[: sampler.fleet.replicas + sampler.fleet.servers]
    return formats


def distinct_formats(
    sampler: SamplerSection, quantization: QuantizationSection
) -> tuple[Format, ...]:
    """What every sync has to produce, in a fixed order."""
    wanted = set(replica_formats(sampler, quantization))
    return tuple(format for format in Format if format in wanted)


def max_sequences(sampler: SamplerSection) -> int:
    """How many sequences an engine decodes at once."""
    return int(sampler.vllm.get("max_num_seqs", MAX_SEQUENCES))


def describe_sampler(sampler: SamplerSection, quantization: QuantizationSection) -> str:
    formats = Counter(replica_formats(sampler, quantization))
    parallel = f"TP{sampler.tensor_parallel}"
    if not is_fleet(sampler):
        if sampler.engines > 1:
            several = f"{sampler.engines} engines of "
        else:
            several = ""
        return f"{several}vLLM, format {quantization.format}, {parallel}"
    kinds = ", ".join(f"{count} {format}" for format, count in formats.items())
    return f"{sum(formats.values())} vLLM servers ({kinds}), {parallel} each"


def is_loopback(address: str) -> bool:
    try:
        host = urlsplit(address).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name, or no address at all
        return False


def distant(sampler: SamplerSection) -> list[str]:
    """Addresses off this machine, as messages may show them."""
    return [
        without_secret(address) for address in sampler.fleet.addresses if not is_loopback(address)
    ]


def without_secret(address: str) -> str:
    if "@" in address:
        return address.rpartition("@")[2]
    return address
