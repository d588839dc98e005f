"""Tiny Qwen3 models, the updates that carry their weights, and the live engines they reach."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import wait_for
from preloaded import forking
from safetensors.torch import save_file
from simulated import quantized_whole
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_rl.config.schema import (
    Config,
    Device,
    Format,
    Precision,
    QuantizationSection,
    RolloutSection,
    RunSection,
    SamplerSection,
)
from megatron_rl.sampler.engine_settings import EngineSettings, write_engine_folder
from megatron_rl.sampler.sampler import GenerationHandle, Sampler
from megatron_rl.types import Prompt, Rollout, SamplingParams
from megatron_rl.weight_sync import file_transport as transport

PROMPTS = [
    Prompt(
        i,
        tuple(3 + (5 * i + 7 * j) % 80 for j in range(5 + i)),
        "",
        {},
    )
    for i in range(6)
]
SAMPLING = SamplingParams(samples=2, max_tokens=6)
PATIENCE_S = 240.0


def make_config(format: Format = Format.none, **sampler) -> Config:
    return Config(
        run=RunSection(device=Device.cpu),
        quantization=QuantizationSection(format=format),
        rollout=RolloutSection(max_prompt_tokens=24, max_response_tokens=24),
        sampler=replace(
            SamplerSection(
                start_timeout_s=240, vllm={"max_num_seqs": 16, "kv_cache_memory_bytes": 100 << 20}
            ),
            **sampler,
        ),
    )


def make_settings(format: Format = Format.none, **sampler) -> EngineSettings:
    return EngineSettings.from_config(make_config(format, **sampler))


@contextmanager
def collecting(
    sampler: Sampler, params: SamplingParams, prompts: list[Prompt], *, first: bool = True
) -> Iterator[list[Rollout]]:
    """Answers, collected by a thread of its own: what is done meanwhile is done in the
    middle of them.

    A prompt follows every one that is answered until then. At the end all are answered, each
    once, and here in order. `first`: begins when something has been answered, else when something
    has been asked.
    """
    rollouts = []
    begun = threading.Event()
    over = threading.Event()

    def collect() -> None:
        asked = len(prompts)
        with closing(sampler.stream(params, seed=5)) as stream:
            stream.add(prompts, 0)
            if not first:
                begun.set()
            while groups := stream.finished():
                rollouts.extend(rollout for group in groups for rollout in group)
                begun.set()
                if not over.is_set():
                    stream.add(
                        [prompts[(asked + i) % len(prompts)] for i in range(len(groups))], asked
                    )
                    asked += len(groups)
        rollouts.sort(key=lambda one: (one.group, one.sample))
        assert [(r.group, r.sample) for r in rollouts] == [
            (g, s) for g in range(asked) for s in range(params.samples)
        ]

    with ThreadPoolExecutor(1) as pool:
        collected = pool.submit(collect)
        collected.add_done_callback(lambda _: begun.set())
        try:
            begun.wait()
            yield rollouts
        finally:
            over.set()
            collected.result(PATIENCE_S)


def rest(stream: GenerationHandle) -> dict[int, list[Rollout]]:
    """Every group that is still to come; none comes twice."""
    groups = {}
    while more := stream.finished():
        for group in more:
            assert [one.sample for one in group] == list(range(len(group)))
            assert {one.group for one in group}.isdisjoint(groups)
            groups[group[0].group] = group
    return groups


def essence(rollouts: Iterable[Rollout]) -> list[tuple]:
    """Fields of rollouts that weights and seeds determine."""
    return [
        (
            one.group,
            one.sample,
            one.token_ids,
            one.logprobs,
            one.finish_reason,
        )
        for one in rollouts
    ]


@dataclass(frozen=True)
class TinyModel:
    folder: Path  # config.json alone
    hf: Qwen3Config

    def weights(self, seed: int) -> dict[str, torch.Tensor]:
        """BF16, large enough that logprobs are far from uniform and every change shows."""
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for name, tensor in self.untrained.items():
            if self.hf.tie_word_embeddings and name == "lm_head.weight":
                continue
            noise = torch.randn(tensor.shape, generator=generator) * (
                0.02 if tensor.ndim == 1 else 0.08
            )
            weights[name] = (tensor + noise).bfloat16()
        return weights

    @cached_property
    def untrained(self) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        return Qwen3ForCausalLM(self.hf).state_dict()

    def quantized(self, seed: int, format: Format) -> dict[str, torch.Tensor]:
        return quantized_whole(self.weights(seed), format)


def make_model(folder: Path, tied: bool, **changes: Any) -> TinyModel:
    """About 0.4M parameters; a vocabulary that is no multiple of anything, so that
    padding takes part.
    """
    sizes = {
        "vocab_size": 101,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    hf = Qwen3Config(
        **sizes | changes,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM"],
    )
    hf.save_pretrained(folder)
    return TinyModel(folder, hf)


class Live:
    """A running engine that is updated through the file transport."""

    def __init__(self, sampler: Sampler, model: TinyModel, format: Format, directory: Path) -> None:
        self.sampler = sampler
        self.model = model
        self.format = format
        self.directory = directory

    @property
    def next_version(self) -> int:
        return self.sampler.policy_version + 1

    def write(self, seed: int) -> Path:
        """The next version on disk, not yet loaded; returns its manifest."""
        transport.remove_version(self.directory, self.next_version)
        tensors = self.model.quantized(seed, self.format).items()
        transport.write_version(self.directory, self.next_version, tensors, format=self.format)
        return transport.manifest_path(self.directory, self.next_version, 0)

    def stage(self, version: int | None = None) -> str:
        """Stage the written version; return its name, by which it is loaded."""
        version = self.next_version if version is None else version
        self.sampler.start_weight_update()
        self.sampler.update_weights(
            transport.update_info(self.directory, version, 1, background=True)
        )
        return str(version)

    def load(self, version: int | None = None) -> None:
        self.sampler.finish_weight_update(self.stage(version))

    def update(self, seed: int, fault: str | Callable[[Path], None] | None = None) -> None:
        """`fault`: one of faulty_receiver's, or what is done to the version before it is loaded."""
        manifest = self.write(seed)
        marker = self.directory / "fault"
        if callable(fault):
            fault(manifest)
        elif fault:
            marker.write_text(fault)
        try:
            self.load()
        finally:
            marker.unlink(missing_ok=True)

    def rollouts(self, seed: int = 1, params: SamplingParams = SAMPLING) -> list[Rollout]:
        return self.sampler.generate(PROMPTS, params, seed=seed)

    def answers(self, **how: Any) -> list[tuple]:
        return essence(self.rollouts(**how))

    def kill(self, engine: int = 0) -> None:
        os.kill(self.sampler.replicas[engine].process.pid, signal.SIGKILL)

    @contextmanager
    def collecting(self, *, first: bool = True) -> Iterator[list[Rollout]]:
        params = SamplingParams(samples=8, max_tokens=24)
        with collecting(self.sampler, params, PROMPTS * 4, first=first) as rollouts:
            yield rollouts

    def until_open(self) -> None:
        """Until the engine works on something; see `collecting` for who asks it."""
        wait_for(lambda: self.sampler.health()["open"] > 0)

    def restart(self) -> None:
        with startable():
            self.sampler.launch()
        self.sampler.wait_ready()


@contextmanager
def startable() -> Iterator[None]:
    """Engines start as forks, with the faults of faulty_receiver.py at hand."""
    with forking(), pytest.MonkeyPatch.context() as patch:
        here = str(Path(__file__).parent)
        patch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
        yield


def make_live(
    folder: Path, format: Format, tied: bool, head: Precision = Precision.bf16, **sampler
) -> Live:
    """Not yet started."""
    model = make_model(folder / "hf", tied)
    settings = replace(make_settings(format, **sampler), head=head)
    engine = Sampler(
        settings, model.folder, folder, worker_extension="faulty_receiver.FaultyExtension"
    )
    return Live(engine, model, format, folder)


def start_live(
    folder: Path, format: Format, tied: bool, seed: int | None = None, **sampler
) -> Iterator[Live]:
    """With weights of this seed, if any; then other engines can start too, in the place of one
    that is killed.
    """
    live = make_live(folder, format, tied, **sampler)
    try:
        live.restart()
        with nullcontext() if seed is None else startable():
            if seed is not None:
                live.update(seed)
            yield live
    finally:
        live.sampler.close()


def fresh_rollouts(live: Live, seed: int, tmp_path: Path) -> list[Rollout]:
    """Rollouts of an engine that starts from the exported quantized checkpoint of these weights."""
    folder = tmp_path / "exported"
    settings = make_settings(live.format, vllm={"model": str(folder), "load_format": "safetensors"})
    write_engine_folder(live.model.folder, folder, settings.quantization)
    save_file(
        live.model.quantized(seed, live.format), folder / "model.safetensors", {"format": "pt"}
    )
    assert json.loads((folder / "config.json").read_text())["architectures"]
    with forking(), Sampler(settings, live.model.folder, tmp_path) as sampler:
        return sampler.generate(PROMPTS, SAMPLING, seed=1)
