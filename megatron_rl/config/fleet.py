"""What a recipe says about its samplers: one embedded engine or a fleet of servers, which formats, and what is wrong.

Imports no torch: every rank asks for the formats, and mistakes are found when the recipe is loaded.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from megatron_rl.config.schema import Config, Device, Format, Transport

LAST_PORT = 65535
FIRST_PORT = 1024
SHORTEST_KEY = 16
LOOPBACK = "127.0.0.1"


def is_fleet(config: Config) -> bool:
    return bool(config.sampler.fleet.replicas > 0 or config.sampler.fleet.addresses)


def replica_formats(config: Config) -> tuple[Format, ...]:
    """The weight format of every engine: the started servers, then the given ones; one for an embedded engine."""
    fleet = config.sampler.fleet
    if not is_fleet(config):
        return (config.quantization.format,)
    return tuple(fleet.formats) or (config.quantization.format,) * (fleet.replicas + len(fleet.addresses))


def local_formats(config: Config) -> tuple[Format, ...]:
    """Those that this machine has to run: servers that are given by address have machines of their own."""
    return replica_formats(config)[: config.sampler.fleet.replicas] if is_fleet(config) else replica_formats(config)


def distinct_formats(config: Config) -> tuple[Format, ...]:
    """What every sync has to produce, in a fixed order."""
    wanted = set(replica_formats(config))
    return tuple(format for format in Format if format in wanted)


def is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_problems(config: Config) -> list[str]:
    """What can be refused before anything else is looked at: addresses, and the key that they need."""
    fleet = config.sampler.fleet
    found = [
        f"sampler.fleet.addresses: {_without_secret(address)!r}: {problem}; write it like http://node7:8000"
        for address in fleet.addresses
        if (problem := _address_problem(address))
    ]
    if len(set(fleet.addresses)) < len(fleet.addresses):
        found.append(f"sampler.fleet.addresses: {fleet.addresses} names a server twice; give each once")
    if not fleet.key_variable.isidentifier():
        found.append(
            f"sampler.fleet.key_variable: {len(fleet.key_variable)} characters that are not the name of a variable; "
            "name the environment variable that holds the key, never the key itself"
        )
        return found
    distant = [address for address in fleet.addresses if not is_loopback(address)]
    key = os.environ.get(fleet.key_variable, "")
    if distant and not key:
        found.append(
            f"sampler.fleet.key_variable: {fleet.key_variable} is not set in the environment, and "
            f"{_without_secret(distant[0])} is not on this machine: whoever reaches it could rewrite the model. Start "
            "the servers with a key and export it under that name"
        )
    elif key and (len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key):
        found.append(
            f"sampler.fleet.key_variable: the key in {fleet.key_variable} has {len(key)} characters, expected at least "
            f"{SHORTEST_KEY} printable ones without spaces; `openssl rand -hex 32` makes one"
        )
    return found


def problems(config: Config, kind: Device) -> Iterator[str]:
    """Everything else that a fleet's keys can have wrong on this kind of machine."""
    fleet = config.sampler.fleet
    if fleet.replicas < 0:
        yield f"sampler.fleet.replicas: {fleet.replicas}, expected 0 (none, or only addresses) or more"
    if not is_fleet(config):
        for key in ("formats", "devices"):
            if getattr(fleet, key):
                yield (
                    f"sampler.fleet.{key}: {getattr(fleet, key)} without servers; set sampler.fleet.replicas or "
                    "addresses, or remove it"
                )
        return
    count = fleet.replicas + len(fleet.addresses)
    if fleet.formats and len(fleet.formats) != count:
        yield (
            f"sampler.fleet.formats: {len(fleet.formats)} formats for {count} servers ({fleet.replicas} replicas and "
            f"{len(fleet.addresses)} addresses); give one for each, or none to run quantization.format everywhere"
        )
    if fleet.restarts < 0:
        yield f"sampler.fleet.restarts: {fleet.restarts}, expected 0 (never) or more"
    if fleet.probe_every_s <= 0:
        yield f"sampler.fleet.probe_every_s: {fleet.probe_every_s:g}, expected above 0"
    yield from _ports(config)
    yield from _devices(config, kind)
    if kind == Device.cpu:
        yield from _memory(config)
    if config.sync.transport != Transport.file:
        yield f"sync.transport: {config.sync.transport} does not reach a fleet of servers yet; use file"
    distant = [address for address in fleet.addresses if not is_loopback(address)]
    if distant and config.sync.dir is None:
        yield (
            f"sync.dir: null is shared memory of this machine, which {_without_secret(distant[0])} cannot read; name a "
            "folder on a file system that it shares"
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
        return "keys do not belong in an address (sampler.fleet.key_variable names the variable that holds them)"
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        return "there is something behind the port"
    return None


def _without_secret(address: str) -> str:
    return address.rpartition("@")[2] if "@" in address else address


def _ports(config: Config) -> Iterator[str]:
    fleet = config.sampler.fleet
    if fleet.port is None:
        return
    last = fleet.port + fleet.replicas - 1
    if fleet.replicas == 0:
        yield f"sampler.fleet.port: {fleet.port} without sampler.fleet.replicas; remove it, addresses carry their own"
    elif fleet.port < FIRST_PORT or last > LAST_PORT:
        yield (
            f"sampler.fleet.port: {fleet.port} to {last}, expected {FIRST_PORT} to {LAST_PORT}; null takes free ones"
        )
    else:
        taken = [port for port in range(fleet.port, last + 1) if not _is_free(port)]
        if taken:
            yield f"sampler.fleet.port: {taken[0]} is in use on this machine; take others, or null for free ones"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _devices(config: Config, kind: Device) -> Iterator[str]:
    fleet, parallel = config.sampler.fleet, config.sampler.tensor_parallel
    if config.sampler.devices is not None:
        yield (
            f"sampler.devices: {config.sampler.devices!r} is for the embedded engine; "
            "sampler.fleet.devices names the GPUs of each server"
        )
    if kind == Device.cpu:
        if fleet.devices:
            yield f"sampler.fleet.devices: {fleet.devices}, but this run has no GPU; remove it"
        return
    if not fleet.devices and fleet.replicas > 1:
        yield (
            f"sampler.fleet.devices: empty, so that {fleet.replicas} servers would share the same GPUs; name those of "
            f'each, such as ["0", "1"]'
        )
    if not fleet.devices:
        return
    if len(fleet.devices) != fleet.replicas:
        yield (
            f"sampler.fleet.devices: {len(fleet.devices)} entries for sampler.fleet.replicas={fleet.replicas}; "
            "give one for each"
        )
    numbers = [number for entry in fleet.devices for number in entry.split(",")]
    if not all(map(str.isdecimal, numbers)) or len(set(numbers)) < len(numbers):
        yield f"sampler.fleet.devices: {fleet.devices}, expected numbers of GPUs such as '4,5', each once in the fleet"
    elif any(len(entry.split(",")) != parallel for entry in fleet.devices):
        yield (
            f"sampler.fleet.devices: {fleet.devices} for sampler.tensor_parallel={parallel}; name as many for each "
            "server"
        )


def _memory(config: Config) -> Iterator[str]:
    """KV caches alone: a fleet multiplies them, and hosts kill what takes too much."""
    fleet, sampler = config.sampler.fleet, config.sampler
    wanted = max(fleet.replicas, 0) * sampler.tensor_parallel * sampler.memory_gib
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    if wanted > installed:
        yield (
            f"sampler.memory_gib: {sampler.memory_gib:g} for each of {fleet.replicas} servers is {wanted:g} GiB, this "
            f"machine has {installed:.0f}; lower it, or sampler.fleet.replicas"
        )
