"""Two engines, of which engine 0 samples in INT8, engine 1 in BF16; what tests do with them, and
with a server.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import wait_for
from tiny_engine import PATIENCE_S, PROMPTS, TinyModel, collecting, make_config
from transformers import Qwen3ForCausalLM
from versions import flip

from megatron_rl.config import to_yaml
from megatron_rl.config.schema import Format, ModelSection
from megatron_rl.processes.process import free_port
from megatron_rl.quantization.formats import BY_FORMAT
from megatron_rl.sampler.replica import Replica
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Prompt, Rollout, SamplingParams
from megatron_rl.weight_sync import file_transport as transport

FORMATS = [Format.int8, Format.none]
KEY_VARIABLE = "MEGATRON_RL_FLEET_KEY"
KEY = "0123456789abcdef" * 2
SAMPLING = SamplingParams(samples=2, max_tokens=8)
LOG = "serve.log"
LONG = replace(SAMPLING, max_tokens=24)
MANY = [PROMPTS[i % len(PROMPTS)] for i in range(60)]  # more than the servers answer at once


@dataclass(eq=False)
class LiveFleet:
    sampler: Sampler
    model: TinyModel
    directory: Path
    peers: dict[int, Qwen3ForCausalLM] = field(default_factory=dict)  # by the seed of their weights

    def update(
        self,
        seed: int,
        fault: Callable[[Path], None] | None = None,
        before_finish: Callable[[], None] = lambda: None,
    ) -> None:
        """The next version for both formats; `fault` is done to the INT8 one."""
        version = self.sampler.policy_version + 1
        infos = {}
        for format in FORMATS:
            folder = self.directory / format.value
            transport.remove_version(folder, version)
            tensors = self.model.quantized(seed, format).items()
            transport.write_version(folder, version, tensors, format=format)
            if fault is not None and format == Format.int8:
                fault(transport.manifest_path(folder, version, 0))
            infos[format.value] = transport.update_info(folder, version, 1, background=True)
        self.sampler.start_weight_update()
        self.sampler.update_weights({BY_FORMAT: infos})
        before_finish()
        self.sampler.finish_weight_update(str(version))

    @property
    def replicas(self) -> list[Replica]:
        return self.sampler.replicas

    def rollouts(
        self, prompts: list[Prompt] = PROMPTS, params: SamplingParams = SAMPLING, seed: int = 1
    ):
        return self.sampler.generate(prompts, params, seed=seed)

    def open(self) -> list[int]:
        """Number of open samples of each server."""
        return [one["open"] for one in self.sampler.health()["engines"]]

    @contextmanager
    def paused(self, one: Replica) -> Iterator[None]:
        """It takes requests, and answers none before the end."""
        pid = one.process.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextmanager
    def collecting(self) -> Iterator[list[Rollout]]:
        with collecting(self.sampler, LONG, MANY) as rollouts:
            yield rollouts

    def reference(self, seed: int, rollout: Rollout) -> np.ndarray:
        """Logprobs of an answer by another implementation, of the weights before
        they were quantized.
        """
        prompt = list(rollout.prompt.token_ids)
        answer = list(rollout.token_ids)
        with torch.no_grad():
            logits = self._peer(seed)(torch.tensor([prompt + answer])).logits[
                0, len(prompt) - 1 : -1
            ]
        return logits.float().log_softmax(-1)[range(len(answer)), answer].numpy()

    def _peer(self, seed: int) -> Qwen3ForCausalLM:
        if seed not in self.peers:
            peer = Qwen3ForCausalLM(self.model.hf).bfloat16().eval()
            peer.load_state_dict(self.model.weights(seed), strict=False)
            self.peers[seed] = peer
        return self.peers[seed]


@contextmanager
def served(model: TinyModel, folder: Path, format: Format = Format.none) -> Iterator[str]:
    """A server that `megatron-rl serve` has started, and its address; it has ended at the end."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(to_yaml(replace(make_config(), model=ModelSection(path=str(model.folder)))))
    port = free_port()
    words = ["-m", "megatron_rl.cli", "serve", str(recipe), "--format", format.value]
    with pytest.MonkeyPatch.context() as patch, (folder / LOG).open("wb") as log:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv(KEY_VARIABLE, KEY)
        process = subprocess.Popen(
            [sys.executable, *words, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            wait_for(lambda: "ready:" in (folder / LOG).read_text() or process.poll() is not None)
            yield f"http://127.0.0.1:{port}"
        finally:
            ended = process.poll()
            process.terminate()
            assert process.wait(PATIENCE_S) == 0, (folder / LOG).read_text()[-4000:]
            assert ended is None, "it outlives its runs"


def flip_a_byte(manifest: Path) -> None:
    (path,) = manifest.parent.glob("*.bin")
    flip(path, 100)
