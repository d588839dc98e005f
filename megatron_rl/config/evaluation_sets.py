"""The configuration keys of evaluation: the `eval` section and its sets."""

from dataclasses import dataclass
from typing import Annotated, Any

from megatron_rl.config.bounds import Nucleus, Positive, Samples, Temperature, are_set_names, at_least, is_reward, need


@dataclass(frozen=True)
class EvalSet:
    """A set with a name; null: as the section has it."""

    # a file as in data.eval, or a preset of conf/data, whose `eval` it is; null: data.eval, measured in another way
    path: str | None = None
    max_prompts: Positive | None = None
    samples: Samples | None = None
    temperature: Temperature | None = None
    top_p: Nucleus | None = None
    max_response_tokens: Positive | None = None
    # as reward.name; null: that
    reward: Annotated[Any | None, need(is_reward, "use what reward.name can be, or null")] = None


@dataclass(frozen=True)
class EvalSection:
    """data.eval, and the sets that have a name: config/evaluation.py says what each comes to."""

    every: Annotated[int, at_least(0, "0 (never) or more")] = 10
    max_prompts: Positive = 256
    samples: Samples = 1  # of each prompt
    temperature: Temperature | None = None  # null: 0 (greedy) for one sample, rollout.temperature for several
    top_p: Nucleus = 1.0
    max_response_tokens: Annotated[int | None, at_least(1, "1 or more, or null")] = None  # null: as in rollout
    sets: Annotated[  # such as {aime: {path: data/aime_2024.parquet, samples: 32}}
        dict[str, EvalSet] | None, need(are_set_names, "a set's name is one of letters, digits, _ and -")
    ] = None
