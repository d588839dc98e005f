"""Mistakes in a fleet's keys, refused before anything starts."""

from dataclasses import replace

import pytest
from tiny_engine import make_config

from megatron_rl.config import ConfigError, load
from megatron_rl.config.engine_rules import addresses
from megatron_rl.config.fleet import (
    devices,
    distinct_formats,
    gpus_of_engines,
    is_loopback,
    local_formats,
    replica_formats,
)
from megatron_rl.config.load import check
from megatron_rl.config.rules import findings
from megatron_rl.config.schema import Config, Device, Format, Transport
from megatron_rl.preflight import engine, roles
from megatron_rl.preflight.machine import Machine

KEY = "MEGATRON_RL_FLEET_KEY"
DISTANT = "http://node7:8000"
HERE = "http://127.0.0.1:8000"


def config(**sampler) -> Config:
    return make_config(Format.int8, **sampler)


def found(config: Config, kind: Device = Device.cpu) -> str:
    facts = vars(config) | {
        "machine": Machine(kind, "a machine", gpus=8 if kind == Device.cuda else 0)
    }
    rules = (engine.several, roles.host_memory, roles.reach)
    return "\n".join([*check(config), *findings(rules, facts)])


def test_formats_of_engines():
    def of(config: Config, function=replica_formats) -> tuple[Format, ...]:
        return function(config.sampler, config.quantization)

    assert of(config()) == of(config(), distinct_formats) == (Format.int8,)
    assert of(config(engines=3)) == (Format.int8,) * 3
    mixed = config(engines=3, formats=[Format.fp8, Format.none, Format.fp8])
    assert of(mixed, distinct_formats) == (Format.none, Format.fp8)
    assert of(mixed, local_formats) == (Format.fp8, Format.none, Format.fp8)
    assert of(config(dedicated_nodes=True), local_formats) == (Format.int8,)
    assert of(config(addresses=[DISTANT]), local_formats) == ()  # on machines of their own


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv(KEY, "k" * 32)


@pytest.mark.parametrize(
    ("sampler", "kind"),
    [
        ({"engines": 2, "formats": [Format.none, Format.int8]}, Device.cpu),
        ({"addresses": [HERE]}, Device.cpu),
        ({"engines": 2, "tensor_parallel": 2, "devices": ["0,1", "2,3"]}, Device.cuda),
    ],
)
def test_a_sound_recipe_has_no_problems(sampler, kind):
    assert found(config(**sampler), kind) == ""


@pytest.mark.parametrize(
    ("given", "one", "two"),
    [
        *((none, [], []) for none in (None, [])),
        (4, ["4"], ["4"]),
        *((both, ["4,5"], ["4", "5"]) for both in ("4,5", ["4,5"], [4, 5])),
    ],
)
def test_a_text_and_a_list_name_gpus(given, one, two):
    assert devices(config(devices=given).sampler) == one
    assert devices(config(devices=given, engines=2).sampler) == two


def test_several_engines_share_the_gpus_out():
    for given in ("0,1,2,3", [0, 1, 2, 3], ["0,1", "2,3"]):
        wide = config(devices=given, engines=2, tensor_parallel=2).sampler
        assert devices(wide) == ["0,1", "2,3"]
    assert gpus_of_engines(config(engines=2, tensor_parallel=2).sampler) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("sampler", "kind", "words"),
    [
        (
            {"engines": 2, "formats": [Format.int8]},
            Device.cpu,
            ["sampler.formats", "1 formats"],
        ),
        ({"addresses": [HERE], "engines": 2}, Device.cpu, ["sampler.engines", "engines=1"]),
        ({"addresses": [HERE], "devices": "0"}, Device.cuda, ["sampler.devices", "remove it"]),
        ({"engines": 2}, Device.cuda, ["sampler.devices", "null", "2 GPUs"]),
        ({"devices": "0", "engines": 2}, Device.cuda, ["sampler.devices", "name 2"]),
        (
            {"devices": ["0", "0"], "engines": 2},
            Device.cuda,
            ["sampler.devices", "each once"],
        ),
        (
            {"devices": ["0", "one"], "engines": 2},
            Device.cuda,
            ["sampler.devices", "one"],
        ),
        ({"devices": {"0": 1}}, Device.cuda, ["sampler.devices", "each once"]),
        (
            {"vllm": {"kv_cache_memory_bytes": 1 << 50}, "engines": 2},
            Device.cpu,
            ["sampler.vllm.kv_cache_memory_bytes", "2097152"],
        ),
        ({"addresses": [DISTANT]}, Device.cpu, ["sync.dir", "null", "node7"]),
    ],
)
def test_nonsense_is_named(sampler, kind, words):
    (said,) = found(config(**sampler), kind).splitlines()
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("transport", "sampler", "key"),
    [
        (Transport.nccl, {"engines": 2, "formats": ["int8", "none"]}, "sampler.formats"),
        (Transport.ipc, {"addresses": [HERE]}, "sync.transport"),
        (Transport.ipc, {"dedicated_nodes": True}, "sync.transport"),
    ],
)
def test_what_other_transports_ask_of_engines(transport, sampler, key):
    made = config(**sampler)
    assert f"{key}: " in found(replace(made, sync=replace(made.sync, transport=transport)))


@pytest.mark.parametrize(
    "given",
    [
        ["node7:8000"],
        ["http://node7"],
        ["http://[::1"],
        ["http://:8000"],
        ["http://node7:80000"],
        ["http://node7:8000/v1"],
        ["http://user:secret@node7:8000"],
        [DISTANT, DISTANT],
    ],
)
def test_addresses_that_cannot_be_meant(given):
    (said,) = addresses(config(addresses=given).sampler)
    assert said.startswith("sampler.addresses")
    assert "secret" not in said


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
    recipe.write_text(f"sampler: {{addresses: ['{address}']}}\n")
    monkeypatch.delenv(KEY)
    with pytest.raises(ConfigError, match=rf"sampler\.addresses: .*{KEY} is not set"):
        load(recipe)
    monkeypatch.setenv(KEY, "k" * 32)
    assert load(recipe).sampler.addresses == [address]


@pytest.mark.parametrize(
    "key", ["short", "with spaces in the middle of it", "k" * 20 + "\n", "ä" * 20]
)
def test_weak_keys_are_refused_and_never_shown(key, monkeypatch):
    monkeypatch.setenv(KEY, key)
    (said,) = addresses(config(addresses=[DISTANT]).sampler)
    assert f"the key in {KEY} has {len(key)} characters" in said
    assert key not in said
    assert addresses(config().sampler) == []
