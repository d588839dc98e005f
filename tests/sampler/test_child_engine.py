"""The child process: it never outlives its parent, interrupts are the parent's, failures are
one clear error.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import wait_for
from preloaded import forking
from tiny_engine import PATIENCE_S, make_model, make_settings

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Format
from megatron_rl.processes.process import state_of
from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.sampler.sampler import Sampler

# a parent that starts a sampler, says which process it owns and when the engine is up, and waits
PARENT = """
import signal
import sys
import time
from pathlib import Path
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.config.schema import Config, Device, RolloutSection, RunSection, SamplerSection

folder = Path(sys.argv[1])
config = Config(
    run=RunSection(device=Device.cpu),
    rollout=RolloutSection(max_prompt_tokens=24, max_response_tokens=24),
    sampler=SamplerSection(start_timeout_s=240, vllm={"kv_cache_memory_bytes": 100 << 20}),
)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs without
sampler = Sampler(EngineSettings.from_config(config), folder, folder)
try:
    sampler.launch()
    print(sampler.replicas[0].process.pid, flush=True)
    sampler.wait_ready()
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    sampler.close()
    print("closed", flush=True)
"""


@contextmanager
def parent_of_an_engine(folder: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """The parent, and the process id of its child."""
    make_model(folder, True)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    child = int(parent.stdout.readline())
    try:
        yield parent, child
    finally:
        parent.kill()
        if is_running(child):
            os.kill(child, signal.SIGKILL)


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


@pytest.mark.engine
def test_the_child_dies_with_a_killed_parent(tmp_path):
    with parent_of_an_engine(tmp_path) as (parent, child):
        assert parent.stdout.readline() == "ready\n"
        assert is_running(child)
        parent.kill()
        parent.wait(PATIENCE_S)
        wait_for(lambda: not is_running(child))


def test_ctrl_c_reaches_the_parent_alone_which_ends_the_child(tmp_path):
    with parent_of_an_engine(tmp_path) as (parent, child):
        assert os.getpgid(child) != os.getpgid(parent.pid)
        os.killpg(parent.pid, signal.SIGINT)  # what a terminal does
        output, _ = parent.communicate(timeout=PATIENCE_S)
        assert "closed" in output
        wait_for(lambda: not is_running(child))


@pytest.mark.engine
def test_a_start_that_fails_says_why_and_shows_the_log(tmp_path):
    model = make_model(tmp_path, True)
    settings = make_settings(vllm={"max_model_len": 1 << 20})
    sampler = Sampler(settings, model.folder, tmp_path)
    why = r"(?s)engine did not start: .*`start` failed: .*max_model_len.*sampler\.log:\n"
    with forking(), pytest.raises(SamplerError, match=why) as caught:
        sampler.start()
    assert "Traceback" in str(caught.value) or "Error" in str(caught.value)
    assert sampler.replicas == []


def test_a_start_that_takes_too_long_names_the_key_and_leaves_no_child(tmp_path):
    sampler = Sampler(
        make_settings(start_timeout_s=0.2), make_model(tmp_path, True).folder, tmp_path
    )
    sampler.launch()
    child = sampler.replicas[0].process.pid
    with pytest.raises(SamplerError, match=r"sampler\.start_timeout_s=0\.2"):
        sampler.wait_ready()
    assert not is_running(child)
    with pytest.raises(SamplerError, match="not running"):
        sampler.health()
    sampler.close()


def test_a_folder_without_config_is_refused_before_anything_starts(tmp_path):
    sampler = Sampler(make_settings(Format.int8), tmp_path, tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path: no config\.json in"):
        sampler.launch()
    assert sampler.replicas == []
