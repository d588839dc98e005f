"""Base class of the learner: builds one rank's megatron-core modules and optimizer, loads weights,
names parameters; random states, memory returned to engines.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# patches torch for CPUs before megatron is imported
from megatron_rl.learner.parallel import LearnerRank, leave

from megatron.core import parallel_state, tensor_parallel  # isort: skip
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads  # isort: skip
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from megatron_rl.config import schema
from megatron_rl.config.schema import Offload, Precision, Sleep
from megatron_rl.distributed import collective_timeout_s, exchange
from megatron_rl.learner import weights
from megatron_rl.learner.modules import cpu
from megatron_rl.learner.modules.logprobs import VocabShare
from megatron_rl.learner.modules.lora import adapt
from megatron_rl.learner.modules.model import PolicyModel, build, transformer_config
from megatron_rl.learner.offload import OptimizerOffload
from megatron_rl.learner.optimizer import optimizer_config, replicas_config
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.models.mapping import global_name
from megatron_rl.models.model import Model
from megatron_rl.models.weight_files import is_checkpoint

RANDOM = "rng."
TRACKER = f"{RANDOM}tracker."


class Policy:
    """A rank's modules, optimizer and place; every rank makes one and calls the same methods."""

    def __init__(self, model: Model, config: schema.Config) -> None:
        cpu.require(config.run.device)
        self.model = model
        self.shape = model.shape
        self.layout = model.layout
        self.run = config.run
        self.learner = config.learner
        self.optim = config.optim
        timeout_s = collective_timeout_s(
            config.run.hang_timeout_s,
            config.sampler.start_timeout_s,
            config.sampler.request_timeout_s,
        )
        self.ranks = LearnerRank(self.learner, model.layout, self.run.seed, timeout_s)
        self.rank, self.world_size = self.ranks.rank, self.ranks.world_size
        self.is_driver = self.ranks.is_driver
        self.device = self.ranks.device
        self.place = self.ranks.place
        self.groups = self.ranks.groups
        # each task of a job has decided learner.recompute=auto for its own node: the driver's holds
        recompute, megatron = self.ranks.broadcast(
            [str(self.learner.recompute), self.learner.megatron]
        )
        self.learner = replace(
            self.learner, recompute=schema.Recompute(recompute), megatron=megatron
        )
        self.steps = 0  # optimizer steps taken
        self.left_out_in_a_row = 0  # updates, that were not finite
        # by forward passes since the last sync: a checkpoint keeps them
        self.measured: dict[str, Tensor] = {}
        self._engine_sleeps = config.sampler.sleep != Sleep.none
        self.megatron_config = transformer_config(model, self.learner)
        self.modules = [self._chunk(chunk) for chunk in range(self.layout.chunks)]
        if self.shape.lora is not None:
            for first_layer, module in self.numbered_modules:
                adapt(module, first_layer, model, self.groups)
        self.chunks = [self._wrapped(module, chunk) for chunk, module in enumerate(self.modules)]
        settings = optimizer_config(
            self.optim, self.learner.precision, self.megatron_config.params_dtype
        )
        self.clip_grad = settings.clip_grad
        gloo = self.device.type != "cpu"
        self.optimizer = get_megatron_optimizer(settings, self.chunks, use_gloo_process_groups=gloo)
        offloads = self.learner.offload is Offload.optimizer
        self.offload = (
            OptimizerOffload(self.optimizer, self.chunks, self.device) if offloads else None
        )
        no_sync = [chunk.no_sync for chunk in self.chunks]
        if len(no_sync) > 1:
            self.megatron_config.no_sync_func = no_sync
        else:
            self.megatron_config.no_sync_func = no_sync[0]
        self.megatron_config.finalize_model_grads_func = _finalize
        tp = self.layout.tp
        vocab = self.shape.vocab
        group = parallel_state.get_tensor_model_parallel_group()
        self.share = VocabShare.of(
            self.place.tp, tp, vocab, self.layout.padded_vocab(vocab) // tp, group
        )

    def _chunk(self, chunk: int) -> PolicyModel:
        """This rank's part of the pipeline: its stage, or a chunk of an interleaved one."""
        return build(
            self.model,
            self.megatron_config,
            first=self.ranks.first_stage and chunk == 0,
            last=self.ranks.last_stage and chunk == self.layout.chunks - 1,
            chunk=chunk if self.layout.vp is not None else None,
        )

    def _wrapped(self, module: PolicyModel, chunk: int) -> DistributedDataParallel:
        inner = module.to(self.device)
        if self.learner.precision is Precision.bf16:
            inner = Float16Module(self.megatron_config, inner)
        sums = replicas_config(self.optim, self.layout.dp * self.layout.cp)
        return DistributedDataParallel(
            self.megatron_config, sums, inner, disable_bucketing=chunk > 0
        )

    @property
    def numbered_modules(self) -> Iterator[tuple[int, PolicyModel]]:
        """Each chunk, with the number that its first layer has in the whole model."""
        for chunk, module in enumerate(self.modules):
            yield self.layout.layers(self.shape.layers, self.place.pp, chunk).start, module

    @property
    def positions_shard(self) -> int | None:
        """This rank's number where the positions of a pack are split over ranks."""
        if self.megatron_config.sequence_parallel:
            return self.place.tp
        return None

    # weights

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's shards; layer and expert numbers in names count over the whole model."""
        first_expert = self.layout.local_experts(self.shape.experts, self.place.ep).start
        for first_layer, module in self.numbered_modules:
            for name, parameter in module.named_parameters():
                yield global_name(name, first_layer, first_expert), parameter

    def load_hf(self, path: Path | str) -> None:
        """Weights of a Hugging Face folder, or of a torch_dist checkpoint of any layout."""
        if is_checkpoint(Path(path)):
            # with torch's own checkpoints: seconds that few runs need
            from megatron_rl.checkpoint.torch_dist import reader as torch_dist

            reader = torch_dist.Reader(Path(path))
            self.load(torch_dist.getter(reader, self.shape), reader.holds_adapters)
        else:
            self.load(HfFolder(path).get)

    def init_random(self, seed: int) -> None:
        """A random model: the same one for every layout."""
        self.load(weights.random_tensors(self.model, seed))

    def load(self, get_hf: Callable[[str], Tensor], adapters_alone: bool = False) -> None:
        """Load weights; adapters that `get_hf` lacks start with no effect."""
        named = (
            (name, parameter)
            for name, parameter in self.named_parameters()
            if parameter.requires_grad or not adapters_alone
        )
        if self.shape.lora is not None and not adapters_alone:
            get_hf = weights.with_new_adapters(get_hf, self.model, self.run.seed)
        weights.load(named, self.model, self.place, get_hf)
        self.optimizer.reload_model_params()
        self.weights_changed()

    def weights_changed(self) -> None:
        """Hook for subclasses; call it after anything has written to the weights."""

    def random_states(self) -> dict[str, Tensor]:
        """The states that the model's own random numbers come from."""
        tensors = {"rng.cpu": torch.get_rng_state()}
        for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
            tensors[f"{TRACKER}{name}"] = state
        if self.device.type != "cpu":
            tensors["rng.device"] = torch.cuda.get_rng_state()
        return {name: value.clone() for name, value in tensors.items()}

    def restore_random(self, tensors: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(tensors["rng.cpu"])
        states = {
            name.removeprefix(TRACKER): value
            for name, value in tensors.items()
            if name.startswith(TRACKER)
        }
        tensor_parallel.get_cuda_rng_tracker().set_states(states)
        if "rng.device" in tensors and self.device.type != "cpu":
            torch.cuda.set_rng_state(tensors["rng.device"])

    # communication with the other ranks

    def broadcast(self, value: Any = None) -> Any:
        """Return the driver's value on every rank: tensors, Batch, and plain JSON values around
        them.
        """
        return self.ranks.broadcast(value)

    def release_memory(self) -> None:
        """Return memory on every rank before a sleeping engine wakes up on these devices."""
        if self.offload is not None:
            self.offload.leave()
        if self.device.type != "cpu" and self._engine_sleeps:
            torch.cuda.empty_cache()
            exchange(None)  # all ranks have released their memory before the driver continues

    def close(self) -> None:
        leave()


def _finalize(
    model: Sequence[torch.nn.Module], num_tokens: Tensor | None = None, **groups: Any
) -> None:
    """Reduce gradients as megatron-core does, without dividing by tokens: losses come divided."""
    finalize_model_grads(list(model), None, **groups)
