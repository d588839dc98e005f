"""Which rows of a data set count: a prompt that stands there often counts once, one with two answers not at all.

Only hashes are kept, 16 bytes a row: a table of two million rows is one of 17 thousand prompts, a hundred times each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash


@dataclass(frozen=True)
class Distinct:
    rows: npt.NDArray[np.int64]  # numbers of those that count, the first of each prompt, ascending
    duplicates: int
    conflicts: int  # prompts that were left out, as their rows do not agree on the answer
    checksum: str = ""  # of prompts and answers, in their order


def distinct(pairs: Iterable[tuple[bytes, bytes]]) -> Distinct:
    """`pairs`: prompt and answer of every row; answers are compared without the space around them."""
    prompt_hashes, answer_hashes = array("Q"), array("Q")
    for prompt, answer in pairs:
        prompt_hashes.append(xxhash.xxh3_64_intdigest(prompt))
        answer_hashes.append(xxhash.xxh3_64_intdigest(answer.strip()))
    prompts, answers = (np.frombuffer(each, np.uint64) for each in (prompt_hashes, answer_hashes))
    if not len(prompts):
        return Distinct(np.zeros(0, np.int64), 0, 0)
    _, first, group = np.unique(prompts, return_index=True, return_inverse=True)
    disagreeing = np.unique(group[answers != answers[first][group]])
    kept = np.sort(np.delete(first, disagreeing)).astype(np.int64)
    checksum = xxhash.xxh3_64_hexdigest(prompts.tobytes() + answers.tobytes())
    return Distinct(kept, len(prompts) - len(first), len(disagreeing), checksum)
