"""The configuration keys of evaluation: the `eval` section and its sets."""

from dataclasses import dataclass
from typing import Annotated, Any

from megatron_rl.config.bounds import Nucleus, Positive, Samples, Temperature, are_set_names, at_least, is_reward, need


@dataclass(frozen=True)
class EvalSet:
    """A set with a name; null: as the section has it."""

    # a file as in data.eval, or a preset of conf/data, whose `eval` it is, such as math; null: data.eval, measured in
    # another way
    path: str | None = None
    max_prompts: Positive | None = None  # as eval.max_prompts, such as 500
    samples: Samples | None = None  # as eval.samples, such as 32
    temperature: Temperature | None = None  # as eval.temperature, such as 0.6
    top_p: Nucleus | None = None  # as eval.top_p, such as 0.7
    max_response_tokens: Positive | None = None  # as eval.max_response_tokens, such as 8192
    # as reward.name, such as math_verify; null: that
    reward: Annotated[Any | None, need(is_reward, "use what reward.name can be, or null")] = None


@dataclass(frozen=True)
class EvalSection:
    """data.eval, and the sets that have a name: config/evaluation.py says what each comes to."""

    every: Annotated[int, at_least(0, "0 (never) or more")] = 10  # steps between evaluations
    max_prompts: Positive = 256  # of each set, its first
    samples: Samples = 1  # answers to each prompt
    # of sampling, such as 1.0; null: 0 (greedy) for one sample, rollout's for several
    temperature: Temperature | None = None
    top_p: Nucleus = 1.0  # tokens are drawn among the first that hold this share of the probability
    # where an answer is cut, such as 8192; null: as in rollout
    max_response_tokens: Annotated[int | None, at_least(1, "1 or more, or null")] = None
    sets: Annotated[  # more held-out sets by name, such as {aime: {path: data/aime_2024.parquet, samples: 32}}
        dict[str, EvalSet] | None, need(are_set_names, "a set's name is one of letters, digits, _ and -")
    ] = None
