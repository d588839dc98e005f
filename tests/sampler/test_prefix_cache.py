"""Cached prefixes: a prompt is prefilled once per policy version, and none of an old version
is answered from.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tiny_engine import Live, make_model, make_settings, rest, startable

from megatron_rl.config.schema import Format
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Prompt, Rollout, SamplingParams

pytestmark = pytest.mark.engine
BLOCK = 32
LENGTH = 40
SAMPLES = 8
PROMPT = Prompt(
    0,
    tuple(3 + 7 * place % 90 for place in range(LENGTH)),
    "",
    {},
)
PARAMS = SamplingParams(samples=SAMPLES, max_tokens=20)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("prefixes")
    model = make_model(folder / "hf", True)
    config = model.folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 320}))
    vllm = {"max_num_seqs": 4, "kv_cache_memory_bytes": 100 << 20, "block_size": BLOCK}
    settings = replace(make_settings(vllm=vllm), max_tokens=320)
    with startable(), Sampler(settings, model.folder, folder) as sampler:
        yield Live(sampler, model, Format.none, folder)


def ask(live: Live) -> list[Rollout]:
    return live.sampler.generate(
        [PROMPT],
        PARAMS,
        seed=3,
    )


def prefilled(live: Live) -> int:
    return live.sampler.health()["prefilled"]


def drawn(rollouts: list[Rollout]) -> list[tuple]:
    return [(one.token_ids, one.policy_version, one.versions) for one in rollouts]


def test_a_prompt_is_prefilled_once_per_version(live: Live) -> None:
    rest = SAMPLES * (LENGTH - BLOCK)  # what fills no block is computed for each
    for seed in (1, 2):
        live.update(seed)
        before = prefilled(live)
        first = ask(live)
        assert prefilled(live) - before == BLOCK + rest
        assert drawn(ask(live)) == drawn(first)
        assert prefilled(live) - before == BLOCK + 2 * rest


def test_no_answer_begins_on_what_old_weights_have_cached(live: Live) -> None:
    """The old version's blocks stay in use by its open answers; half of the samples wait
    for room meanwhile.
    """
    live.update(1)
    old = ask(live)
    stream = live.sampler.stream(PARAMS, seed=5)
    stream.add([PROMPT] * 4, 0)
    live.until_open()
    live.update(2)
    new = ask(live)
    begun = [one for group in rest(stream).values() for one in group]
    live.update(2)
    assert [one.token_ids for one in new] == [one.token_ids for one in ask(live)]
    assert {one.policy_version for one in new} == {live.sampler.policy_version - 1}
    assert [one.token_ids for one in new] != [one.token_ids for one in old]
    live.update(2)
    late = [
        one
        for one in begun
        if one.versions is None and one.policy_version == live.sampler.policy_version - 2
    ]
    assert late, "some had not begun"
    fresh = live.sampler.stream(PARAMS, seed=5)
    fresh.add([PROMPT] * 4, 0)
    whole = rest(fresh)
    same = [one.token_ids == whole[one.group][one.sample].token_ids for one in late]
    assert sum(same) > 0.8 * len(same), "but for rounding"


def test_the_turns_of_a_conversation_prefill_what_was_added(live: Live) -> None:
    """Linear in turns: of each the engine has what it wrote and read before, but for
    the last block.
    """
    added = 12
    turns = 6
    tokens = list(PROMPT.token_ids)
    before = prefilled(live)
    whole = 0
    asking = live.sampler.turns(replace(PARAMS, samples=1), patient=True)
    try:
        for turn in range(turns):
            asked = asking.ask(tokens, max_tokens=20, seed=turn, key="a session")
            completion = asyncio.run(asked)
            whole += len(tokens)
            tokens += [*completion.token_ids, *PROMPT.token_ids[:added]]
    finally:
        asking.close()
    assert len(tokens) > 4 * BLOCK
    assert prefilled(live) - before <= LENGTH + turns * (added + BLOCK) < whole
