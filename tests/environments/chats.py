"""Chat templates and conversations for tests: a policy that says anything, and what must hold of
every request and row.

`python chats.py FOLDER COUNT [PART]` tries the published templates of templates.yaml that
FOLDER/NAME.jinja holds, by their hash; PART is in the names of those to try.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rollouts import rollout
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.environments.conversation import SENTINEL, Conversation, Turn
from megatron_rl.types import Rollout

APPENDS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or "
    "[] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% "
    "if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# what was thought before the user's last message is left out, and answers are trimmed
DROPS_THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set "
    "ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% set said = "
    "m.content %}{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in said %}"
    "{% set said = said.split('</think>')[-1] %}{% endif %}<|im_start|>{{ m.role }}\n{{ said | "
    "trim }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif "
    "%}"
)
# the number of messages stands before all of them: nothing stays as it was
REWRITES = "{{ messages | length }}: " + APPENDS
# an answer has no end of its own
NEVER_CLOSES = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
# thinking is opened for the model, and written otherwise where it was closed
OPENS_THINKING = APPENDS.replace(
    "assistant\n{% endif", "assistant\n<think>\n\n</think>\n\n{% endif"
)
# an answer is asked for whether it is to be or not
ALWAYS_OPENS = APPENDS.replace("{% if add_generation_prompt %}", "{% if true %}")
# an answer is closed by what no answer ends with
CLOSES_OTHERWISE = NEVER_CLOSES.replace("{{ m.content }} ", "{{ m.content }}<|im_start|>")
# what was asked for nothing more is ended twice
ENDS_ALL = APPENDS.replace("{% endif", "{% else %}<|endoftext|>{% endif")
# an answer that calls has no text
CALLS_ALONE = APPENDS.replace(
    "{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
)
OWN = {
    "appends": APPENDS,
    "drops thinking": DROPS_THINKING,
    "rewrites": REWRITES,
    "never closes": NEVER_CLOSES,
    "opens thinking": OPENS_THINKING,
    "always opens": ALWAYS_OPENS,
    "closes otherwise": CLOSES_OTHERWISE,
    "ends all": ENDS_ALL,
    "calls alone": CALLS_ALONE,
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "", "parameters": {"type": "object"}},
    }
]


def folder_of(
    folder: Path,
    template: str,
    special: Sequence[str] = SPECIAL,
    stops: Sequence[str] = SPECIAL[1:],
) -> Path:
    """A model folder with this chat template, and a byte-level tokenizer of its special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = [
        "the answer is not what they think it is: 12 + 30 = 42, <think> so </think> user "
        "assistant tool system"
    ]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in special]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[0],
        "eos_token": stops[0],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.token_to_id(one) for one in stops]})
    )
    return folder


ROW = rollout(())


def completion(ids: Sequence[int], versions: Sequence[int] = (0,), **given: Any) -> Rollout:
    if len(versions) > 1:
        given["versions"] = versions
    return rollout(ids, policy_version=versions[0], **given)


@dataclass
class Talk:
    """A conversation, with all of its requests and samples."""

    tokenizer: FolderTokenizer
    random: random.Random
    appends: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.tokenizer, self.options, appends=self.appends)
        # tokens of each request, and what was sampled for it
        self.asked: list[tuple[list[int], list[int]]] = []

    def say(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()
    ) -> dict[str, Any]:
        """Play one turn; return the message of the policy's response."""
        turn = self.conversation.request(messages, tools)
        ids = self.sampled()
        self.asked.append((turn.tokens, ids))
        assert turn.number == len(self.asked) - 1
        self.check_added(turn)
        stopped = ids[-1:] and ids[-1] in self.tokenizer.stop_token_ids
        text = self.tokenizer.decode_all(ids[:-1] if stopped else ids)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if tools and self.random.random() < 0.5:
            call = {"name": "add", "arguments": {"a": 1, "b": [2, "x"]}}
            message["tool_calls"] = [{"id": "call00000", "type": "function", "function": call}]
        self.conversation.answered(turn, completion(ids), message)
        return message

    def check_added(self, turn: Turn) -> None:
        """Check that the tokens between two responses are exactly the template's."""
        before = turn.parent
        if before is None or before.sampled is None:
            return
        place = len(before.messages)
        if "tool_calls" in turn.messages[place]:  # they stand behind the text
            return
        marked = [
            *turn.messages[:place],
            {"role": "assistant", "content": SENTINEL},
            *turn.messages[place + 1 :],
        ]
        text = self.tokenizer.render(
            marked, self.options, tools=turn.tools, opened=True
        ).rpartition(SENTINEL)[2]
        stops = self.tokenizer.stop_token_ids
        found = min(
            (
                (at, one)
                for one in stops
                if (at := text.find(self.tokenizer.decode_all([one]))) >= 0
            ),
            default=None,
        )
        if found is not None:
            text = text[found[0] :]
            if before.sampled.token_ids[-1] in stops:
                text = text.removeprefix(self.tokenizer.decode_all([found[1]]))
        assert self.tokenizer.decode_all(turn.added) == text, (
            "something else was added than the template writes"
        )

    def sampled(self) -> list[int]:
        """Arbitrary samples: unusual tokenizations, thinking, partial characters; ended or cut."""
        draw = self.random
        ids = list[int]()
        if draw.random() < 0.4:
            ids += self.tokenizer.encode("<think>\n" + " so" * draw.randrange(4) + "\n</think>\n\n")
        for _ in range(draw.randrange(1, 6)):
            word = draw.choice(
                ["the answer", " 42", "\n", "é", "日本", "<tool_call>{", " ", "user", "}"]
            )
            whole = self.tokenizer.encode(word)
            ids += (
                whole
                if draw.random() < 0.5
                else [one for piece in word for one in self.tokenizer.encode(piece)]
            )
        if draw.random() < 0.1:
            ids = ids[: draw.randrange(1, len(ids) + 1)]  # also in the middle of a character
        return ids + ([draw.choice(self.tokenizer.stop_token_ids)] if draw.random() < 0.8 else [])

    def check(self) -> Counter[str]:
        """Raises AssertionError where a promise is broken; counts forks, turns and rows."""
        rows = self.conversation.rows(ROW)
        trained = Counter[tuple[int, int]]()
        for row in rows:
            whole = [*row.prompt.token_ids, *row.token_ids]
            columns = (row.token_ids, row.loss_mask, row.turns, row.logprobs)
            assert len({len(column) for column in columns}) == 1
            for turn in sorted(set(row.turns) - {-1}):
                places = [place for place, number in enumerate(row.turns) if number == turn]
                begin = places[0]
                before = len(row.prompt.token_ids)
                tokens, ids = self.asked[turn]
                assert whole[: before + begin] == tokens, (
                    f"turn {turn} stands behind other tokens than it was drawn behind"
                )
                assert (
                    list(row.token_ids[begin : begin + len(ids)])
                    == ids
                    == [row.token_ids[one] for one in places]
                )
                trained.update(
                    (turn, place) for place, one in enumerate(places) if row.loss_mask[one]
                )
            assert all(
                number >= 0 for number, kept in zip(row.turns, row.loss_mask, strict=True) if kept
            )
        every = Counter(
            {
                (turn, place): 1
                for turn, (_, ids) in enumerate(self.asked)
                for place in range(len(ids))
            }
        )
        assert trained == every, "a sampled token is trained on not once"
        grows = 0
        for turn, (tokens, _) in enumerate(self.asked):
            behind = self.conversation.turns[turn].parent
            if behind is not None:
                before = [*self.asked[behind.number][0], *self.asked[behind.number][1]]
                assert tokens[: len(before)] == before, (
                    "a request does not begin with the exact tokens before it"
                )
                grows += 1
        return Counter(
            rows=len(rows),
            forks=len(rows) - 1,
            turns=len(self.asked),
            grows=grows,
        )


def play(talk: Talk, tools: bool = True) -> Counter[str]:
    """A conversation of an environment, or, at times, of an agent that rewrites or goes back."""
    draw = talk.random
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": "What is 12 + 30?"}]
    if draw.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "think"})
    histories = [messages]
    agent = draw.random() < 0.3 and not talk.appends
    for _ in range(draw.randrange(1, 6)):
        messages = draw.choice(histories) if agent and draw.random() < 0.3 else messages
        answer = talk.say(messages, TOOLS if tools else ())
        if agent and draw.random() < 0.2:
            answer = answer | {"content": answer["content"].strip()}
        more: dict[str, Any] = {
            "role": "user",
            "content": draw.choice(["No. Again.", "é", "  ", "42\n"]),
        }
        if "tool_calls" in answer:
            more = {
                "role": "tool",
                "name": "add",
                "tool_call_id": "call00000",
                "content": draw.choice(["42", "", "é"]),
            }
        messages = [*messages, answer, more]
        histories.append(messages)
    return talk.check()


@dataclass(frozen=True, eq=False)
class Published:
    """A published template, as templates.yaml has it."""

    name: str
    source: str
    sha256: str
    special: Sequence[str]
    stops: Sequence[str]
    tools: bool = True  # it shows them
    # options of the template
    cases: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"": {}})

    def read(self, folder: Path) -> str | None:
        """The template; None where the folder does not have it."""
        path = folder / f"{self.name}.jinja"
        if not path.is_file():
            return None
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != self.sha256:
            raise SystemExit(
                f"{path} is another template: sha256 {found}, templates.yaml has {self.sha256}"
            )
        return path.read_text()


def published() -> list[Published]:
    listed = yaml.safe_load(Path(__file__).with_name("templates.yaml").read_text())
    return [Published(name, **about) for name, about in listed.items()]


def many(
    tokenizer: FolderTokenizer, count: int, options: Mapping[str, Any], tools: bool
) -> tuple[Counter[str], ...]:
    """Results of this many conversations, and the count of the template's refusals."""
    total = Counter[str](conversations=count)
    refused = Counter[str]()
    for seed in range(count):
        talk = Talk(tokenizer, random.Random(seed), options=options)
        try:
            total += play(talk, tools=tools)
        except AssertionError:
            raise
        except Exception as error:  # of the template
            refused[f"{type(error).__name__}: {str(error)[:60]}"] += 1
            total += talk.check()
    return total, refused


def main(folder: Path, count: int, part: str = "") -> None:
    for one in published():
        template = one.read(folder) if part in one.name else None
        if template is None:
            continue
        with tempfile.TemporaryDirectory() as place:
            tokenizer = FolderTokenizer(folder_of(Path(place), template, one.special, one.stops))
            for case, options in one.cases.items():
                total, refused = many(tokenizer, count, options, one.tools)
                print(one.name, case, dict(total), dict(refused), flush=True)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        *sys.argv[3:],
    )
