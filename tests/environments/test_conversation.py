"""Exact tokens of conversations: requests grow by what was added, or fork; every sampled token is
trained on once.
"""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from environments.chats import (
    ALWAYS_OPENS,
    APPENDS,
    CLOSES_OTHERWISE,
    DROPS_THINKING,
    ENDS_ALL,
    OWN,
    ROW,
    Talk,
    completion,
    folder_of,
    play,
)

from megatron_rl.batch import collate
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.environments.conversation import Conversation, Turn
from megatron_rl.types import Rollout, Scored


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FolderTokenizer]:
    place = tmp_path_factory.mktemp("templates")
    return {
        name: FolderTokenizer(folder_of(place / str(number), one))
        for number, (name, one) in enumerate(OWN.items())
    }


@pytest.mark.parametrize("template", OWN)
@pytest.mark.parametrize("appends", [False, True])
def test_any_conversation_keeps_its_promises(
    tokenizers: dict[str, FolderTokenizer], template: str, appends: bool
) -> None:
    forks = 0
    for seed in range(150):
        talk = Talk(tokenizers[template], random.Random(seed), appends=appends)
        if appends and template in ("never closes", "closes otherwise"):
            with pytest.raises(ValueError, match="history=template"):
                environment(talk, THOUGHTS)
            return
        forks += play(talk)["forks"]
    assert (forks == 0) == appends  # where agents go back, every template forks


def environment(talk: Talk, answers: list[str], role: str = "user", stopped: bool = True) -> None:
    """A conversation with these responses."""
    conversation = talk.conversation
    tokenizer = talk.tokenizer
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    for text in answers:
        turn = conversation.request(messages)
        ids = [*tokenizer.encode(text), *tokenizer.stop_token_ids[: int(stopped)]]
        talk.asked.append((turn.tokens, ids))
        answer = {"role": "assistant", "content": text}
        conversation.answered(turn, completion(ids), answer)
        messages = [*messages, answer, {**NO, "role": role}]


HM = {"role": "user", "content": "Hm?"}
NO = {"role": "user", "content": "No."}
THOUGHTS = [
    "<think>\nso\n</think>\n\n42",
    "<think>\nso so\n</think>\n\n43",
    "<think>\nno\n</think>\n\n44",
]


def test_left_out_thinking_forks_and_the_rest_of_an_answer_stays_as_it_was_sampled(
    tokenizers: dict[str, FolderTokenizer],
) -> None:
    talk = Talk(tokenizers["drops thinking"], random.Random(0))
    environment(talk, THOUGHTS)
    assert talk.check() == {"rows": 3, "forks": 2, "turns": 3, "grows": 0}
    (last, *_) = [row for row in talk.conversation.rows(ROW) if 2 in row.turns]
    text = talk.tokenizer.decode_all([*last.prompt.token_ids, *last.token_ids])
    assert "so" not in text
    assert "\n42<|im_end|>" in text
    assert "\n43<|im_end|>" in text
    behind = Talk(tokenizers["drops thinking"], random.Random(0))
    environment(behind, THOUGHTS, role="tool")  # no word of the user: thinking stays
    assert behind.check() == {"rows": 1, "forks": 0, "turns": 3, "grows": 2}


@pytest.mark.parametrize(
    ("template", "stopped", "text"),
    [
        ("always opens", True, "42<|im_end|>\n<|im_start|>user"),
        ("always opens", False, "42<|im_end|>\n<|im_start|>user"),
        ("closes otherwise", True, "42<|im_end|><|im_start|>[user]"),
        ("closes otherwise", False, "42<|im_start|>[user]"),
    ],
)
def test_answers_are_closed_as_the_template_closes_them(
    tokenizers: dict[str, FolderTokenizer], template: str, stopped: bool, text: str
) -> None:
    talk = Talk(tokenizers[template], random.Random(0))
    environment(talk, ["42", "43", "44"], stopped=stopped)
    assert talk.check() == {"rows": 1, "forks": 0, "turns": 3, "grows": 2}
    assert text in talk.tokenizer.decode_all(talk.asked[1][0])


def test_a_response_with_unusual_tokenization_is_not_retokenized(
    tokenizers: dict[str, FolderTokenizer],
) -> None:
    for name in ("appends", "drops thinking"):
        talk = Talk(tokenizers[name], random.Random(0))
        tokenizer = talk.tokenizer
        conversation = talk.conversation
        odd = [one for piece in "the answer" for one in tokenizer.encode(piece)]
        assert odd != tokenizer.encode("the answer")
        ids = [*tokenizer.encode("<think>\nso\n</think>\n\n"), *odd, tokenizer.stop_token_ids[0]]
        first = conversation.request([HM])
        answer = {"role": "assistant", "content": "<think>\nso\n</think>\n\nthe answer"}
        conversation.answered(first, completion(ids), answer)
        then = conversation.request([HM, answer, NO])
        assert " ".join(map(str, odd)) in " ".join(map(str, then.tokens)), name


def test_what_goes_on_with_no_answer_is_appended_to_none(
    tokenizers: dict[str, FolderTokenizer],
) -> None:
    conversation = Conversation(tokenizers["appends"], appends=True)
    tokenizer = tokenizers["appends"]
    plan, judge = ([{"role": "user", "content": text}] for text in ("PLAN", "JUDGE"))
    for messages, text in ((plan, "40"), (plan, "41"), (judge, "42")):
        answer = {"role": "assistant", "content": text}
        conversation.answered(
            conversation.request(messages), completion(tokenizer.encode(text)), answer
        )
    said = {"role": "assistant", "content": "40"}
    asked = (
        [*plan, said, NO],
        [{"role": "system", "content": "Be short."}, NO, said, NO],
        [*judge, NO],
    )
    texts = [tokenizer.decode_all(conversation.request(messages).tokens) for messages in asked]
    assert texts == [
        tokenizer.render(
            messages,
            {},
            tools=(),
            opened=True,
        )
        for messages in asked
    ]


def test_rows_know_the_version_of_each_token(tokenizers: dict[str, FolderTokenizer]) -> None:
    conversation = Conversation(tokenizers["appends"])
    first = conversation.request([HM])
    answer = {"role": "assistant", "content": "the"}
    ids = tokenizers["appends"].encode("the answer")
    conversation.answered(
        first,
        completion(ids, [3, *[4] * (len(ids) - 1)]),
        answer,
    )
    then = conversation.request([HM, answer, NO])
    conversation.answered(then, completion([5], [5]), answer)
    (row,) = conversation.rows(ROW)
    own = [version for version, kept in zip(row.versions, row.loss_mask, strict=True) if kept]
    assert own == [3] + [4] * (len(ids) - 1) + [5]


def test_rows_have_each_token_s_experts_as_of_the_turn_that_sampled_it(
    tokenizers: dict[str, FolderTokenizer],
) -> None:
    """A later turn may have read the conversation anew, with other weights."""
    conversation = Conversation(tokenizers["appends"])
    first = conversation.request([HM])
    answer = {"role": "assistant", "content": "the"}
    ids = tokenizers["appends"].encode("the answer")
    read = len(first.tokens) + len(ids) - 1
    conversation.answered(
        first, replace(completion(ids), experts_SLK=np.full((read, 2, 1), 1, np.uint8)), answer
    )
    then = conversation.request([HM, answer, NO])
    later = replace(completion([5]), experts_SLK=np.full((len(then.tokens), 2, 1), 2, np.uint8))
    conversation.answered(then, later, answer)
    (row,) = conversation.rows(ROW)
    assert row.experts_SLK[:, 0, 0].tolist() == [1] * read + [2] * (len(then.tokens) - read)


def with_top(ids: list[int], first: int) -> Rollout:
    """A completion with one, two, ... top tokens at its tokens, whose ids count up from `first`."""
    counts = [1 + at % 3 for at in range(len(ids))]
    total = sum(counts)
    return replace(
        completion(ids),
        top_counts=counts,
        top_ids=range(first, first + total),
        top_logprobs=np.linspace(-1, -2, total, dtype=np.float16),
    )


def test_text_that_the_policy_did_not_sample_has_no_top_tokens(
    tokenizers: dict[str, FolderTokenizer],
) -> None:
    """A tool's reply is between the turns; one of two second turns forks."""
    conversation = Conversation(tokenizers["appends"])
    first = conversation.request([HM])
    answer = {"role": "assistant", "content": "the"}
    ids = tokenizers["appends"].encode("the answer")
    conversation.answered(first, with_top(ids, 100), answer)
    for number, reply in enumerate(("no", "nothing")):
        then = conversation.request([HM, answer, {"role": "tool", "content": reply}])
        conversation.answered(then, with_top([5, 6], 200 + 100 * number), answer)
    rows = conversation.rows(ROW)
    assert [sum(row.loss_mask) for row in rows] == [len(ids) + 2, 2]
    own = first.sampled.top_counts.tolist()
    for number, row in enumerate(rows):
        assert sum(row.top_counts) == len(row.top_ids) == len(row.top_logprobs)
        sampled = [turn >= 0 for turn in row.turns]
        assert [count > 0 for count in row.top_counts] == sampled
        assert 0 in row.top_counts
        assert [count for count in row.top_counts if count] == [*own, 1, 2]
        last = 200 + 100 * number
        assert list(row.top_ids) == [*range(100, 100 + sum(own)), last, last + 1, last + 2]
        assert row.top_logprobs.dtype == np.float16
    batch = collate([Scored(row, 0.0) for row in rows])
    assert batch.rows(torch.tensor([1])).top_ids_E.tolist() == list(rows[1].top_ids)
    empty = Scored(ROW, 0.0, error="no response")
    assert torch.equal(
        collate([empty, *(Scored(row, 0.0) for row in rows)]).top_ids_E, batch.top_ids_E
    )


def test_a_conversation_may_have_thousands_of_turns() -> None:
    turn = None
    for number in range(3000):
        turn = Turn(
            number,
            (),
            (),
            "",
            turn,
            [number],
            completion([7]),
        )
    assert turn.tokens[-3:] == [2998, 7, 2999] and len(turn.tokens) == 5999


def test_templates_are_distinguished(tmp_path: Path) -> None:
    from megatron_rl.environments.templates import behaviour

    tool = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    grows = behaviour(FolderTokenizer(folder_of(tmp_path / "a", APPENDS)), {}, tool)
    assert (grows.appends_tool, grows.appends_user, grows.thinking_stays) == (True, True, True)
    for number, one in enumerate((ALWAYS_OPENS, CLOSES_OTHERWISE, ENDS_ALL)):
        assert behaviour(FolderTokenizer(folder_of(tmp_path / f"{number}", one)), {}, tool) == grows
    drops = behaviour(FolderTokenizer(folder_of(tmp_path / "b", DROPS_THINKING)), {}, tool)
    assert (drops.appends_user, drops.thinking_stays) == (True, False)
    assert "it forks" in drops.describe()
