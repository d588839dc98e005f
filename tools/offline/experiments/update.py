"""Seconds of a learner's update by its parts, in one process without an engine.

    update.py PROJECT OUT [--name update] [--fp8 blockwise] [--only NAME ...] [--device cpu --tiny]

The recipe for one GPU at its model's own size with random weights. Each number is written to
OUT/NAME.jsonl as soon as it is known:

  logprobs     Learner.logprobs: a forward pass, as the reference's
  update       Learner.update as in the recipe, where it also measures norms for the sync
  anchored     the same with anchor logprobs given: it measures no norms
  body         layers alone; update - body is the output layer, the loss and the step
  bare         megatron-core's forward, backward and step on the same packs (tools/bench/learner.py)
  head         output layer of one pack: forward, both, its products alone
  step, norm   the optimizer

then the update with one thing changed: recompute, tokens of a micro-batch, sizes of logits; last a
trace of a small update, with its summary by kind of kernel. A part that this version of the project
does not have is written as an error, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from results import Results, demand_gpu
from trace_summary import summarize

RECIPE = "recipes/grpo-qwen3_0.6b-1n1g-int8.yaml"
CARD = Path("conf/model/Qwen3-0.6B.json")
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
}
RECOMPUTE = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "none": {"recompute_granularity": None},
}
PIECES_MIB = (16, 96, 256)
TRACED_ROWS = 58  # two packs
PROMPT = 12
LOGPROB = -11.9  # of random weights over 152k tokens
MIB = 1 << 20


def make_learner(options: argparse.Namespace) -> Any:
    """The recipe's learner with random weights."""
    import torch

    from megatron_rl.learner.learner import Learner  # isort: skip  # before megatron
    from megatron_rl.config.load import load
    from megatron_rl.models.layout import Layout
    from megatron_rl.models.model import Model

    overrides = [
        f"rollout.max_response_tokens={options.response}",
        f"run.device={options.device}",
        "model.path=none",
        "data.train=none",
    ]
    if options.fp8:
        overrides += ["learner.megatron.fp8=e4m3", f"learner.megatron.fp8_recipe={options.fp8}"]
    config = load(RECIPE, overrides)
    card = json.loads(options.card.read_text())
    if options.tiny:
        card |= TINY
    if options.device == "cuda":
        demand_gpu()
    model = Model.of(card, Layout.from_config(config.learner))
    learner = Learner(model, config)
    with torch.no_grad():
        for _, weight in learner.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(std=0.02)
    learner.optimizer.reload_model_params()
    learner.weights_changed()
    return learner


def targets_of(bench: Any, batch: Any) -> Any:
    """Inputs of an update of the recipe: reference logprobs, no anchor."""
    import torch

    logprobs_N = torch.full(batch.mask_N.shape, LOGPROB)
    targets = bench.targets_of(batch, logprobs_N)
    return replace(targets, anchor_logprobs_N=None, ref_logprobs_N=logprobs_N)


def run_body(learner: Any, packs: Any) -> None:
    """Forward and backward of all layers, without the output layer."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    (module,) = learner.modules

    def loss(hidden: Any) -> Any:
        return hidden.float().mean(), torch.zeros((), dtype=torch.int), {}

    def step(iterator: Any, model: Any) -> Any:
        pack = next(iterator)
        embedded = module.embedding(pack.tokens_S[None], pack.positions_S[None])
        packed, angles = module._packed(pack)
        hidden = module.decoder(
            hidden_states=embedded,
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=packed,
        )
        return hidden, loss

    for chunk in learner.chunks:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(packs)],
        model=learner.chunks,
        num_microbatches=len(packs),
        seq_length=1,
        micro_batch_size=1,
        forward_only=False,
    )


class Head:
    """The output layer of one pack."""

    def __init__(self, learner: Any, pack: Any) -> None:
        import torch

        (self.module,) = learner.modules
        self.learner = learner
        self.pack = pack
        self.weight = self.module.shared_embedding_or_output_weight()
        size = (len(pack.labels_N), 1, self.weight.shape[1])
        given = {"device": self.weight.device, "dtype": self.weight.dtype}
        self.hidden = torch.randn(size, **given).requires_grad_()

    def scores(self) -> Any:
        from megatron_rl.learner.modules.head import scores

        layer = self.module.output_layer
        asked = self.learner._asked()
        return scores(layer, self.hidden, self.weight, self.pack, asked, False)

    def forward(self) -> None:
        import torch

        with torch.no_grad():
            self.scores()

    def both(self) -> None:
        import torch

        torch.autograd.grad(self.scores().logprobs_N.sum(), (self.hidden, self.weight))

    def products(self) -> None:
        """The four products of a forward and backward pass over parts of the vocabulary."""
        hidden = self.hidden.detach().squeeze(1)
        for part in self.weight.detach().split(3456):
            logits = hidden @ part.t()
            logits = hidden @ part.t()
            _ = logits.t() @ hidden
            _ = logits @ part


class Experiment:
    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        self.options = options
        self.cuda = options.device == "cuda"
        self.torch = torch
        self.results = Results(options.out / f"{options.name}.jsonl")
        self.learner = make_learner(options)
        self.results.note("learner", project=options.project)

        import learner as bench  # tools/bench/learner.py of the project

        from megatron_rl.learner.modules import costs

        self.bench = bench
        self.costs = costs
        model = self.learner.model
        lengths_B = torch.full((options.rows,), options.response)
        self.batch = bench.random_batch(lengths_B, PROMPT, model.shape.vocab, LOGPROB)
        self.share = self.learner.part(self.batch)
        self.targets = targets_of(bench, self.batch)
        self.packs = self.learner._packs(self.share, torch.arange(options.rows))
        each = costs.operations(model, PROMPT + options.response)
        self.head_flops = each.head
        self.body_flops = options.rows * (PROMPT + options.response) * each.body
        self.flops = self.body_flops + options.rows * options.response * each.head

    def sync(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def time(self, name: str, call: Callable[[], Any], flops: float, rounds: int = 0) -> None:
        """Median seconds after a first round, of which so many were the CPU's to enqueue."""
        if self.options.only and name not in self.options.only:
            return
        seconds = []
        enqueued = []
        try:
            for _ in range((rounds or self.options.rounds) + 1):
                if self.cuda:
                    self.torch.cuda.reset_peak_memory_stats()
                self.sync()
                began = time.perf_counter()
                call()
                enqueued.append(time.perf_counter() - began)
                self.sync()
                seconds.append(time.perf_counter() - began)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:300]
            self.results.note(name, error=message)
            gc.collect()
            if self.cuda:
                self.torch.cuda.empty_cache()
            return
        usual = statistics.median(seconds[1:])
        values = {
            "s": round(usual, 4),
            "enqueued_s": round(statistics.median(enqueued[1:]), 4),
            "first_s": round(seconds[0], 3),
            "tflops": round(flops / usual / 1e12, 1),
        }
        if self.cuda:
            values["peak_gib"] = round(self.torch.cuda.max_memory_allocated() / 2**30, 2)
        self.results.note(name, **values)

    def run(self) -> None:
        learner = self.learner
        sizes = [len(pack.tokens_S) for pack in self.packs]
        self.results.note(
            "packs",
            tokens=sizes,
            tflop_forward=round(self.flops / 1e12, 1),
        )
        self.time("logprobs", lambda: learner.logprobs(self.share), self.flops)
        self.time("update", lambda: learner.update(self.share, self.targets), 3 * self.flops)
        anchored = replace(self.targets, anchor_logprobs_N=self.targets.ref_logprobs_N)
        self.time("anchored", lambda: learner.update(self.share, anchored), 3 * self.flops)
        self.time("body", lambda: run_body(learner, self.packs), 3 * self.body_flops)
        self.time(
            "bare",
            lambda: self.bench.bare(learner, self.packs),
            3 * self.flops,
        )
        self.time("step", learner.optimizer.step, 0)
        self.time("norm", learner.optimizer.get_grad_norm, 0)
        self.head()
        self.variants()
        if not self.options.only or "trace" in self.options.only:
            self.trace()

    def head(self) -> None:
        head = Head(self.learner, self.packs[0])
        flops = self.head_flops * len(self.packs[0].labels_N)
        self.time("head forward", head.forward, flops)
        self.time("head", head.both, 3 * flops)
        self.time("head products", head.products, 4 * flops)

    def variants(self) -> None:
        learner = self.learner

        def update(name: str) -> None:
            self.time(
                f"update, {name}",
                lambda: learner.update(self.share, self.targets),
                3 * self.flops,
                2,
            )

        plain = dict(vars(learner.megatron_config))
        for name, fields in RECOMPUTE.items():
            self.set_megatron(fields)
            update(f"recompute {name}")
            self.set_megatron({field: plain.get(field) for field in RECOMPUTE["full"]})
        settings = learner.learner
        for times in (2, 4):
            tokens = times * settings.tokens_per_microbatch
            learner.learner = replace(settings, tokens_per_microbatch=tokens)
            update(f"{times}x tokens")
        learner.learner = settings
        for mib in PIECES_MIB:
            # sizes of logits worked on at once, where this version has such sizes
            sizes = {"DEVICE_BYTES": mib * MIB, "LOGIT_BYTES": max(96, mib) * MIB}
            known = {name: sizes[name] for name in sizes if hasattr(self.costs, name)}
            if known:
                with mock.patch.multiple(self.costs, **known):
                    update(f"pieces of {mib} MiB")

    def set_megatron(self, fields: dict[str, Any]) -> None:
        for module in self.learner.modules:
            for part in module.modules():
                config = getattr(part, "config", None)
                if config is self.learner.megatron_config:
                    for name, value in fields.items():
                        setattr(config, name, value)

    def trace(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        batch = self.batch.rows(self.torch.arange(min(len(self.batch), TRACED_ROWS)))
        given = self.learner.part(batch), targets_of(self.bench, batch)
        self.learner.update(*given)
        self.sync()
        activities = [ProfilerActivity.CPU]
        if self.cuda:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, record_shapes=True) as trace:
            self.learner.update(*given)
            self.sync()
        path = self.options.out / f"{self.options.name}_trace.json.gz"
        trace.export_chrome_trace(str(path))
        summary = path.with_name(f"{self.options.name}_trace.txt")
        summary.write_text(summarize(path))
        self.results.note("trace", summary=summary.name)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("project", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--name", default="update")
    parser.add_argument("--card", type=Path, default=CARD, help="config.json of another size")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fp8", help="blockwise or tensorwise: FP8 in the learner")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="two small layers, for a CPU")
    parser.add_argument("--only", nargs="*", help="these parts alone")
    options = parser.parse_args()
    options.out = options.out.absolute()
    os.chdir(options.project)
    sys.path[:0] = [os.getcwd(), os.path.join(os.getcwd(), "tools", "bench")]
    Experiment(options).run()


if __name__ == "__main__":
    main()
