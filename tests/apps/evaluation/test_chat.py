"""A conversation with a scripted sampler: its requests, forgotten turns, refusals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from collectors import Script
from rollouts import rollout

from megatron_rl.apps.evaluation.chat import Chat, ChatError
from megatron_rl.config import from_mapping
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.data.toy import write_tokenizer
from megatron_rl.types import Prompt, Rollout, SamplingParams

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}={% else %}+{% endif %}{% endfor %}"


class Counter(Script):
    """Responds with the number of its prompt tokens; records its requests."""

    def __init__(self, tokenizer: FolderTokenizer) -> None:
        self.asked: list[str] = []
        self.params: list[SamplingParams] = []
        self._tokenizer = tokenizer

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, **_: Any
    ) -> list[Rollout]:
        self.params.append(params)
        self.asked += self._tokenizer.decode([list(prompt.token_ids) for prompt in prompts])
        ids = self._tokenizer.encode(str(len(prompts[0].token_ids)))
        return [rollout(ids, prompt=prompts[0])]


def chat(tmp_path: Path, talks: bool, **sections: Any) -> tuple[Chat, Counter]:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    if talks:
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = FolderTokenizer(tmp_path)
    sampler = Counter(tokenizer)
    config = from_mapping(
        {"rollout": {"max_prompt_tokens": 12, "max_response_tokens": 5}, **sections}
    )
    return Chat(sampler, tokenizer, config, talks), sampler  # type: ignore[arg-type]


def test_a_conversation_goes_on_until_its_beginning_has_no_room(tmp_path: Path) -> None:
    talk, sampler = chat(tmp_path, talks=True)
    assert [talk.answer(text) for text in ("1", "22", "333")] == ["2", "7", "9"]
    assert sampler.asked == ["1=", "1=2+22=", "22=7+333="]  # with the first two, 13 tokens
    assert (sampler.params[0].temperature, sampler.params[0].max_tokens) == (0.0, 5)


def test_without_a_template_each_text_is_continued(tmp_path: Path) -> None:
    talk, sampler = chat(tmp_path, talks=False, eval={"temperature": 0.5, "max_response_tokens": 9})
    assert [talk.answer(text) for text in ("1+1", "2+2=")] == ["3", "4"]
    assert sampler.asked == ["1+1", "2+2="]
    assert (sampler.params[0].temperature, sampler.params[0].max_tokens) == (0.5, 9)


def test_the_run_s_system_prompt_and_options_come_first(tmp_path: Path) -> None:
    talk, sampler = chat(tmp_path, talks=True, data={"system_prompt": "9"})
    talk.answer("1")
    assert sampler.asked == ["9+1="]


def test_a_text_that_has_no_room_is_refused_and_forgotten(tmp_path: Path) -> None:
    talk, sampler = chat(tmp_path, talks=True)
    with pytest.raises(ChatError, match=r"14 tokens, .* rollout\.max_prompt_tokens"):
        talk.answer("1234567890123")
    assert talk.answer("1") == "2"
    assert sampler.asked == ["1="]
