"""Held-out sets of data.eval and eval.sets, resolved (file, sampling, reward, metrics); longest
response and sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_rl.config.plain_yaml import presets, read_preset
from megatron_rl.config.schema import Config, EvalSection, EvalSet, RewardSection, RolloutSection


@dataclass(frozen=True)
class HeldOut:
    """A held-out set. The set of data.eval has no name."""

    name: str
    path: str
    max_prompts: int
    samples: int
    temperature: float
    top_p: float
    max_tokens: int  # of a response
    reward: RewardSection

    @property
    def key(self) -> str:
        """The configuration key that names the file of this set."""
        if self.name:
            return f"eval.sets.{self.name}.path"
        return "data.eval"

    @property
    def prefix(self) -> str:
        """Prefix of the metrics of this set."""
        if self.name:
            return f"eval/{self.name}/"
        return "eval/"

    @property
    def ks(self) -> list[int]:
        """Values of k for pass@k: powers of 2, and all samples. pass@1 is the accuracy."""
        return sorted(
            {1 << power for power in range(1, self.samples.bit_length())} | {self.samples} - {1}
        )

    def metrics(self) -> Iterator[str]:
        """Names of the metrics that this set logs; maj@k only if its reward reports the extracted
        answer.
        """
        yield from (f"{self.prefix}{name}" for name in ("accuracy", "reward_mean"))
        yield from (f"{self.prefix}pass@{k}" for k in self.ks)
        yield from (f"{self.prefix}maj@{k}" for k in self.ks[-1:])


def held_out(config: Config) -> list[HeldOut]:
    """Return every held-out set, that of data.eval first."""
    sets = [("", EvalSet())] if config.data.eval else []
    sets += (config.eval.sets or {}).items()
    return [_resolved(name, one, config) for name, one in sets]


def _resolved(name: str, one: EvalSet, config: Config) -> HeldOut:
    section = config.eval
    rollout = config.rollout
    samples = one.samples or section.samples
    temperature = one.temperature
    if temperature is None:
        temperature = section.temperature
    if temperature is None and samples > 1:
        temperature = rollout.temperature
    return HeldOut(
        name=name,
        path=_file(one.path) if one.path else config.data.eval or "",
        max_prompts=one.max_prompts or section.max_prompts,
        samples=samples,
        temperature=temperature or 0.0,
        top_p=one.top_p or section.top_p,
        max_tokens=one.max_response_tokens
        or section.max_response_tokens
        or rollout.max_response_tokens,
        reward=config.reward if one.reward is None else replace(config.reward, name=one.reward),
    )


def _file(path: str) -> str:
    """Return the path of a file, or of the file that a preset of conf/data names."""
    preset = presets("data").get(path)
    if preset is None:
        return path
    return str(read_preset(preset).get("eval") or path)


def max_response_tokens(rollout: RolloutSection, section: EvalSection) -> int:
    """Return the most response tokens in training or evaluation; engines reserve context for it."""
    return max(rollout.max_response_tokens, *evaluated_tokens(section))


def longest_sequence(rollout: RolloutSection, section: EvalSection) -> int:
    """Return the largest number of tokens of a prompt with its response, or of a conversation."""
    return max(
        rollout.context_tokens, rollout.max_prompt_tokens + max_response_tokens(rollout, section)
    )


def evaluated_tokens(section: EvalSection) -> Sequence[int]:
    """Return the response lengths that evaluations set, besides that of the rollouts."""
    sets = (section.sets or {}).values()
    return [section.max_response_tokens or 0, *(one.max_response_tokens or 0 for one in sets)]
