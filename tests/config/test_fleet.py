"""What is wrong with a fleet's keys is said before anything starts: key, value, way out."""

from dataclasses import replace

import pytest
from tiny_engine import make_config

from megatron_rl.config import ConfigError, load
from megatron_rl.config.engine_rules import addresses
from megatron_rl.config.fleet import (
    devices,
    distinct_formats,
    gpus_of_engines,
    is_fleet,
    is_loopback,
    local_formats,
    replica_formats,
)
from megatron_rl.config.load import check
from megatron_rl.config.rules import findings
from megatron_rl.config.schema import Config, Device, FleetSection, Format, Transport
from megatron_rl.preflight import roles
from megatron_rl.preflight.machine import Machine

KEY = "MEGATRON_RL_FLEET_KEY"
DISTANT = "http://node7:8000"


def config(sampler: dict | None = None, **fleet) -> Config:
    return make_config(Format.int8, fleet=FleetSection(**fleet), **(sampler or {}))


def found(config: Config, kind: Device = Device.cpu) -> str:
    facts = vars(config) | {
        "machine": Machine(kind, "a machine", gpus=8 if kind == Device.cuda else 0)
    }
    rules = (roles.fleet_gpus, roles.host_memory, roles.reach)
    return "\n".join([*check(config)[1], *findings(rules, facts)])


def test_formats_of_embedded_engines_and_fleets():
    def of(config: Config, function=replica_formats) -> tuple[Format, ...]:
        return function(config.sampler, config.quantization)

    assert not is_fleet(config().sampler)
    assert of(config()) == of(config(), distinct_formats) == (Format.int8,)
    assert of(config(replicas=2, addresses=[DISTANT])) == (Format.int8,) * 3
    mixed = config(replicas=2, addresses=[DISTANT], formats=[Format.fp8, Format.none, Format.fp8])
    assert of(mixed, distinct_formats) == (Format.none, Format.fp8)
    assert of(mixed, local_formats) == (Format.fp8, Format.none)
    assert of(config(servers=1), local_formats) == (Format.int8,)  # on a node of this job


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY, "k" * 32)


def test_a_sound_fleet_has_no_problems():
    sound = config(
        replicas=1, addresses=["http://127.0.0.1:8000"], formats=[Format.none, Format.int8]
    )
    assert found(sound) == ""
    assert addresses(sound.sampler) == []
    on_gpus = config({"tensor_parallel": 2, "devices": ["0,1", "2,3"]}, replicas=2)
    assert found(on_gpus, Device.cuda) == ""


@pytest.mark.parametrize(
    ("given", "embedded", "fleet"),
    [
        *((none, [], []) for none in (None, [])),
        *((both, ["4,5"], ["4,5"]) for both in ("4,5", ["4,5"])),
        (4, ["4"], ["4"]),
        ([4, 5], ["4,5"], ["4", "5"]),
        (["0,1", "2,3"], ["0,1,2,3"], ["0,1", "2,3"]),
    ],
)
def test_a_text_and_a_list_name_gpus(given, embedded, fleet):
    assert devices(config({"devices": given}).sampler) == embedded
    assert devices(config({"devices": given}, replicas=2).sampler) == fleet


@pytest.mark.parametrize("given", ["0,1,2,3", [0, 1, 2, 3], ["0,1", "2,3"]])
def test_several_embedded_engines_share_the_gpus_out(given):
    assert devices(config({"devices": given, "engines": 2, "tensor_parallel": 2}).sampler) == [
        "0,1",
        "2,3",
    ]
    assert gpus_of_engines(config({"engines": 2, "tensor_parallel": 2}).sampler) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("sampler", "fleet", "kind", "words"),
    [
        ({}, {"replicas": -1}, Device.cpu, ["sampler.fleet.replicas", "-1", "0"]),
        (
            {},
            {"replicas": 2, "formats": [Format.int8]},
            Device.cpu,
            ["sampler.fleet.formats", "1 formats for 2"],
        ),
        ({}, {"formats": [Format.int8]}, Device.cpu, ["sampler.fleet.formats", "without servers"]),
        ({"devices": ["0"]}, {"replicas": 1}, Device.cpu, ["sampler.devices", "no GPU"]),
        ({}, {"replicas": 2}, Device.cuda, ["sampler.devices", "share the same GPUs"]),
        ({"devices": ["0"]}, {"replicas": 2}, Device.cuda, ["sampler.devices", "1 entries"]),
        ({"devices": "0"}, {"replicas": 2}, Device.cuda, ["sampler.devices", "1 entries"]),
        (
            {"devices": ["0"]},
            {"addresses": ["http://localhost:1"]},
            Device.cuda,
            ["sampler.devices", "1 entries"],
        ),
        ({"devices": ["0", "0"]}, {"replicas": 2}, Device.cuda, ["sampler.devices", "each once"]),
        ({"devices": ["0", "one"]}, {"replicas": 2}, Device.cuda, ["sampler.devices", "one"]),
        (
            {"devices": ["0,1"]},
            {"replicas": 1},
            Device.cuda,
            ["sampler.devices", "tensor_parallel=1"],
        ),
        ({"devices": {"0": 1}}, {"replicas": 1}, Device.cuda, ["sampler.devices", "each once"]),
        ({"devices": ["0", "1"]}, {}, Device.cuda, ["sampler.devices: '0,1'", "tensor_parallel=1"]),
        (
            {"vllm": {"kv_cache_memory_bytes": 1 << 50}},
            {"replicas": 2},
            Device.cpu,
            ["sampler.vllm.kv_cache_memory_bytes", "2.09715e+06 GiB"],
        ),
        ({}, {"addresses": [DISTANT]}, Device.cpu, ["sync.dir", "null", "node7"]),
    ],
)
def test_nonsense_is_named(sampler, fleet, kind, words):
    (said,) = found(config(sampler, **fleet), kind).splitlines()
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("transport", "fleet", "words"),
    [
        (
            Transport.nccl,
            {"replicas": 2, "formats": [Format.int8, Format.none]},
            "sampler.fleet.formats",
        ),
        *(
            (Transport.ipc, far, "within one host")
            for far in ({"addresses": ["http://localhost:1"]}, {"servers": 1})
        ),
    ],
)
def test_what_other_transports_ask_of_a_fleet(transport, fleet, words):
    made = config(**fleet)
    assert words in found(replace(made, sync=replace(made.sync, transport=transport)))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("node7:8000", "scheme"),
        ("http://node7", "port is missing"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://:8000", "host or port is missing"),
        ("http://node7:80000", "range"),
        ("http://node7:8000/v1", "behind the port"),
        ("http://user:secret@node7:8000", "keys do not belong in an address"),
    ],
)
def test_addresses_that_cannot_be_meant(address, words):
    (said,) = addresses(config(addresses=[address]).sampler)
    assert said.startswith("sampler.fleet.addresses")
    assert words in said
    assert "secret" not in said


def test_the_same_server_twice():
    (said,) = addresses(config(addresses=[DISTANT, DISTANT]).sampler)
    assert "twice" in said


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "[::1]", "localhost"])
def test_loopback(host, monkeypatch):
    monkeypatch.delenv(KEY)
    assert is_loopback(f"http://{host}:1")
    assert addresses(config(addresses=[f"http://{host}:1"]).sampler) == []


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "10.0.0.1", "node7", "127.0.0.1.example", "localhost.example"]
)
def test_elsewhere_a_key_is_needed_when_the_recipe_is_loaded(host, monkeypatch, tmp_path):
    address = f"http://{host}:1"
    assert not is_loopback(address)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"sampler: {{fleet: {{addresses: ['{address}']}}}}\n")
    monkeypatch.delenv(KEY)
    with pytest.raises(ConfigError, match=rf"sampler\.fleet\.addresses: .*{KEY} is not set"):
        load(recipe)
    monkeypatch.setenv(KEY, "k" * 32)
    assert load(recipe).sampler.fleet.addresses == [address]


@pytest.mark.parametrize(
    "key", ["short", "with spaces in the middle of it", "k" * 20 + "\n", "ä" * 20]
)
def test_weak_keys_are_refused_and_never_shown(key, monkeypatch):
    monkeypatch.setenv(KEY, key)
    (said,) = addresses(config(addresses=[DISTANT]).sampler)
    assert f"the key in {KEY} has {len(key)} characters" in said
    assert key not in said
    assert addresses(config(replicas=1).sampler) == []  # of this run, with a key of its own
