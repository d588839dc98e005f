"""How a server of the fleet is started: its command line, its share of the cores, its key."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_rl.config.schema import FleetSection, SamplerSection
from megatron_rl.engine import server_key
from megatron_rl.engine.server_key import RequireKey
from megatron_rl.sampler.fleet import serve
from megatron_rl.sampler.fleet.server_process import command_line

KEY = "k" * 32


def test_engine_arguments_become_options():
    words = command_line(
        {"load_format": "dummy", "enforce_eager": True, "swap": False, "seed": 3, "x": None, "y": {"a": 1}}
    )
    assert words == ["--load-format", "dummy", "--enforce-eager", "--no-swap", "--seed", "3", "--y", '{"a": 1}']


def test_a_server_ends_with_its_parent_s_end_of_the_pipe():
    server = subprocess.Popen(
        [sys.executable, "-m", "megatron_rl.engine.server", str(os.getpid()), "all"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        time.sleep(0.5)
        assert server.poll() is None
        server.stdin.close()
        assert server.wait(240) == -signal.SIGKILL
    finally:
        server.kill()
        server.wait()


def ask(app, headers=(), kind="http") -> list[dict]:
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.disconnect"}

    scope = {"type": kind, "path": "/collective_rpc", "method": "OPTIONS", "headers": list(headers)}
    asyncio.run(app(scope, receive, send))
    return sent


@pytest.fixture
def guarded(monkeypatch) -> RequireKey:
    async def app(scope, receive, send):
        await send({"type": "reached"})

    monkeypatch.setenv(server_key.VARIABLE, KEY)
    return RequireKey(app)


@pytest.mark.fault("requests to a server without its key, or with a part of it", "401, and its application never runs")
def test_only_the_key_gets_through(guarded):
    assert ask(guarded, [(b"Authorization", b"Bearer " + KEY.encode())]) == [{"type": "reached"}]
    for headers in (
        [],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Bearer " + KEY[:-1].encode())],
        [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer " + KEY.encode())],
    ):
        start, body = ask(guarded, headers)
        assert start["status"] == 401
        assert KEY.encode() not in body["body"]
        assert json.loads(body["body"])
    assert ask(guarded, kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert ask(guarded, kind="lifespan") == [{"type": "reached"}]


def test_no_server_without_a_key(monkeypatch):
    monkeypatch.delenv(server_key.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="does not start without a key"):
        RequireKey(None)


@pytest.mark.parametrize(
    ("given", "fleet", "wanted"),
    [
        (None, {}, None),
        ("4", {}, "4"),
        ("4", {"replicas": 2}, "4"),
        (["4", "5"], {"replicas": 2}, None),
        ([4, 5], {}, "4,5"),
    ],
)
def test_a_server_by_itself_takes_no_gpus_of_the_run_s_own(given, fleet, wanted):
    assert serve.own_devices(SamplerSection(devices=given, fleet=FleetSection(**fleet))) == wanted
