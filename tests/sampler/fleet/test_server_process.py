"""How a server of the fleet is started: its command line, its share of the GPUs, its end."""

import os
import signal
import subprocess
import sys
import time

import pytest
from megatron_rl.sampler.fleet import serve
from megatron_rl.sampler.fleet.server_process import command_line

from megatron_rl.config.schema import FleetSection, SamplerSection


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
