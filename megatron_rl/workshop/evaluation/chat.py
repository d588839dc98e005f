"""`megatron-rl chat`: a stored model in an engine answers what is typed, in a conversation where it has a template."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.config.evaluation import longest_answer
from megatron_rl.config.schema import Config
from megatron_rl.data.tokenizer import FolderTokenizer, has_template
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Prompt, SamplingParams
from megatron_rl.workshop.evaluation.stored_model import StoredModel


class Unanswered(ValueError):
    """Why a text has no answer, such as its length; the next one may have."""


def sampling(config: Config, tokenizer: FolderTokenizer) -> SamplingParams:
    section = config.eval
    return SamplingParams(
        samples=1,
        max_tokens=longest_answer(config.rollout, section),
        temperature=section.temperature or 0.0,
        top_p=section.top_p,
        stop_token_ids=tokenizer.stop_token_ids,
    )


@dataclass
class Chat:
    """A conversation, where the model has a chat template; else each text is continued by itself."""

    sampler: Sampler
    tokenizer: FolderTokenizer
    config: Config
    talks: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: int = 0

    @classmethod
    def with_model(cls, sampler: Sampler, stored: StoredModel, config: Config) -> Chat:
        return cls(sampler, FolderTokenizer(stored.folder), config, has_template(stored.folder))

    def answer(self, text: str) -> str:
        """Answer a text; a conversation that has become too long loses its beginning."""
        self.messages.append({"role": "user", "content": text})
        while len(ids := self._encoded(text)) > self.config.rollout.max_prompt_tokens:
            if not self.talks or len(self.messages) == 1:
                self.messages.pop()
                most = self.config.rollout.max_prompt_tokens
                raise Unanswered(
                    f"this has {len(ids)} tokens, the engine takes {most}: raise rollout.max_prompt_tokens"
                )
            del self.messages[:2]
        self.turns += 1
        prompt = Prompt(self.turns, tuple(ids), text, {})
        params = sampling(self.config, self.tokenizer)
        (rollout,) = self.sampler.generate([prompt], params, seed=self.turns, first_group=0, step=0)
        (said,) = self.tokenizer.decode([rollout.token_ids])
        self.messages.append({"role": "assistant", "content": said})
        return said

    def _encoded(self, text: str) -> list[int]:
        if self.talks:
            said = self.config.data.system_prompt
            system = [] if said is None else [{"role": "system", "content": said}]
            text = self.tokenizer.text([*system, *self.messages], self.config.data.template)
        return self.tokenizer.encode(text)
