"""A learner in this process beside live engines in their own processes; writes results as JSON."""

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_engine import Live, make_config, make_live, startable
from transformers import Qwen3ForCausalLM

from megatron_rl.apps.mismatch.mismatch import LOGPROB, Comparison
from megatron_rl.batch import collate
from megatron_rl.config.schema import Format, Forward, LearnerSection, Precision
from megatron_rl.learner.learner import Learner
from megatron_rl.models.model import Model
from megatron_rl.types import Rollout, SamplingParams, Scored

SEED = 3
FAULTS = ("layers_exchanged", "gate_and_up_exchanged", "norms_exchanged", "heads_exchanged")
# of transformers' modules, and the points whose values they are
THEIRS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "head_norm": ("self_attn.q_norm", "self_attn.k_norm"),
    "o_proj": ("self_attn.o_proj",),
    "post_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "activation": ("mlp.act_fn",),
    "down": ("mlp.down_proj",),
}


class MismatchCase:
    def __init__(self, folder: Path, format: Format, head: Precision = Precision.bf16) -> None:
        folder.mkdir()
        self.head = head
        self.live: Live = make_live(folder, format, tied=True, head=head)
        with startable():
            self.live.sampler.start()
        self.live.update(SEED)
        save_file(
            self.live.model.weights(SEED), folder / "hf" / "model.safetensors", {"format": "pt"}
        )
        self.rollouts = self.live.rollouts(params=SamplingParams(samples=1, max_tokens=12))[:3]

    @contextmanager
    def learner(self, forward: Forward) -> Iterator[Learner]:
        config = replace(make_config(self.live.format), learner=LearnerSection(forward=forward))
        model = Model.read(self.live.model.folder, config.learner, self.head)
        with closing(Learner(model, config)) as learner:
            learner.load_hf(self.live.model.folder)
            yield learner

    def compare(self, learner: Learner) -> dict[str, Any]:
        batches = [collate([Scored(rollout, reward=0.0)]) for rollout in self.rollouts]
        compared = Comparison(learner)
        before = [learner.logprobs(batch).tolist() for batch in batches]
        for batch, rollout in zip(batches, self.rollouts, strict=True):
            compared.add(batch, self.values(rollout))
        logits = self.values(self.rollouts[0])["lm_head"]
        return {
            "kl": compared.kl / compared.apart[LOGPROB].count,
            "own": {str(point): found.max for point, found in compared.own.items()},
            "apart": {str(point): found.max for point, found in compared.apart.items()},
            "rounded logits": bool((logits == logits.bfloat16()).all()),
            "left alone": before == [learner.logprobs(batch).tolist() for batch in batches],
        }

    def faults(self, learner: Learner) -> dict[str, list[str]]:
        """Points where a fault in the engine's weights raises the local difference."""
        healthy = self.compare(learner)["own"]
        found = {}
        for fault in FAULTS:
            self.live.update(SEED, fault)
            own = self.compare(learner)["own"]
            found[fault] = [point for point, most in own.items() if most > 4 * healthy[point] + 0.1]
        self.live.update(SEED)
        return found

    def values(self, rollout: Rollout) -> dict[str, torch.Tensor]:
        return self.live.sampler.activations([*rollout.prompt.token_ids, *rollout.token_ids])

    def beside_transformers(self) -> dict[str, float]:
        """Largest relative difference of each point from transformers' modules."""
        model = Qwen3ForCausalLM.from_pretrained(self.live.model.folder, dtype=torch.bfloat16)
        passed: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(lambda _, args, out, name=name: passed.update({name: out}))
        (rollout, *_) = self.rollouts
        with torch.no_grad():
            model(torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids]]))
        found = {}
        for point, engine in self.values(rollout).items():
            layer, _, kind = point.partition("layers.")[2].partition(".")
            if kind not in THEIRS:
                continue
            parts = [passed[f"model.layers.{layer}.{name}"].flatten(2)[0] for name in THEIRS[kind]]
            if kind == "activation":  # theirs is of the gate alone
                parts = [parts[0] * passed[f"model.layers.{layer}.mlp.up_proj"][0]]
            theirs = torch.cat(parts, 1)
            found[point] = float((engine - theirs).float().norm() / theirs.float().norm())
        return found


def main() -> None:
    out = Path(sys.argv[1])
    found = dict[str, Any]()
    for format in (Format.int8, Format.fp8):
        case = MismatchCase(out / format.value, format)
        with closing(case.live.sampler):
            for forward in Forward:
                with case.learner(forward) as learner:
                    found[f"{format} {forward}"] = case.compare(learner)
                    if (format, forward) == (Format.int8, Forward.bf16):
                        found["faults"] = case.faults(learner)
    wide = MismatchCase(out / "wide", Format.none, Precision.fp32)
    with closing(wide.live.sampler), wide.learner(Forward.bf16) as learner:
        found["fp32 logits"] = wide.compare(learner)
        wide.live.update(SEED + 1)
        wide.live.update(SEED)
        found["fp32 logits, again"] = wide.compare(learner)
    bf16 = MismatchCase(out / "none", Format.none)
    with closing(bf16.live.sampler), bf16.learner(Forward.bf16) as learner:
        found["bf16"] = bf16.compare(learner)
        found["transformers"] = bf16.beside_transformers()
        found["bf16 faults"] = bf16.faults(learner)
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
