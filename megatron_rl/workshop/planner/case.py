"""Case of a plan: a recipe, a config.json and a machine, with roles, workload and memory computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_rl.config.evaluation import longest_sequence
from megatron_rl.config.fleet import distinct_formats
from megatron_rl.config.schema import Config, Device
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.models.shape import Lora
from megatron_rl.preflight.machine import Gpu, Machine
from megatron_rl.preflight.roles import Roles, roles
from megatron_rl.workshop.planner.activations import Pack, Training
from megatron_rl.workshop.planner.engine_memory import GIB, EngineMemory, of_engine
from megatron_rl.workshop.planner.learner_memory import LearnerMemory, of_stage
from megatron_rl.workshop.planner.weights import EngineWeights, engine_weights
from megatron_rl.workshop.planner.workload import Assumptions, Workload

USABLE = 0.99  # of the memory that a GPU is sold with


@dataclass(frozen=True)
class Case:
    config: Config
    hf_config: Mapping[str, Any]
    machine: Machine
    assumed: Assumptions

    @cached_property
    def model(self) -> Model:
        learner, head = self.config.learner, self.config.model.head_precision
        return Model.of(self.hf_config, Layout.from_config(learner), head, Lora.of(learner.lora))

    @cached_property
    def roles(self) -> Roles:
        return roles(self.model.layout, self.config.sampler, self.machine.gpus)

    @cached_property
    def work(self) -> Workload:
        return Workload.of(self.config, self.config.learner, self.assumed)

    @cached_property
    def training(self) -> Training:
        return Training.of(self.config.learner, self.host)

    @property
    def packs(self) -> int:
        """Micro-batches of an update, of one replica."""
        return self.work.packs(self.config.learner, self.model)

    @property
    def host(self) -> bool:
        return self.machine.kind == Device.cpu

    @property
    def gpu(self) -> Gpu:
        assert self.machine.gpu is not None, "time is planned for GPUs of a known kind"
        return self.machine.gpu

    @property
    def limit(self) -> float | None:
        """Bytes of a GPU; None: not known."""
        return self.machine.gib * GIB * USABLE if self.machine.gib else None

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its answer that an engine makes room for."""
        return longest_sequence(self.config.rollout, self.config.eval)

    @cached_property
    def weights(self) -> EngineWeights:
        format = distinct_formats(self.config.sampler, self.config.quantization)[0]
        return engine_weights(self.model.shape, format, tuple(self.config.quantization.ignore))

    @cached_property
    def engine(self) -> EngineMemory:
        sampler, quantization = self.config.sampler, self.config.quantization
        return of_engine(self.model, sampler, quantization, self.weights, self.longest, self.limit, self.host)

    def stages(self, pack: Pack, packs: int) -> list[LearnerMemory]:
        """The learner's memory by pipeline stage."""
        reference = bool(self.config.loss.kl_coef) and self.model.shape.lora is None
        return [
            of_stage(self.model, self.config.learner, stage, pack, packs, host=self.host, reference=reference)
            for stage in range(self.model.layout.pp)
        ]

    @cached_property
    def heaviest(self) -> LearnerMemory:
        """The pipeline stage that needs the most."""
        stages = self.stages(self.work.worst_pack(self.config.learner, self.model), self.packs)
        return max(stages, key=lambda one: one.needed)
