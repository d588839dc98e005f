"""Writes the task of `quickstart --task tools`: products that a tiny policy cannot work out, and a
tokenizer in which a tool call is a few pieces. What its warm start imitates calls the tool in some
rows, and guesses in the others.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.data.toy import (
    TEXT_END,
    TURN_END,
    TURN_START,
    hf_config,
    save_tokenizer,
    write_rows,
)
from megatron_rl.files import JsonObject, write_json

# factors: all products have six digits
SMALLEST = 317
LARGEST = 999
PRODUCTS = 12_000
HELD_OUT = 256
CALLS = 0.35  # of the questions of a warm start; the others are answered with a guess
GUESSED = -4  # a guess is rounded to two of the six digits
CALL_START = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "'
CALL_END = '"}}\n</tool_call>'
SPECIAL = (TEXT_END, TURN_START, TURN_END)
PIECES = (
    CALL_START,
    CALL_END,
    "<tools>",
    "</tools>",
    "calculate",
    "<tool_response>",
    "</tool_response>",
    "system",
    "user",
    "assistant",
    "\n",
)
CHARACTERS = "0123456789+-*=() "
# as Qwen's templates write conversations; of the tools only the names, as the context is short
TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool.function.name }}{% if not loop.last %} {% endif %}{% endfor %}</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write_tools(folder: Path) -> dict[str, int]:
    """Writes `model/` (config and tokenizer, no weights), `train.jsonl` and `test.jsonl`;
    `warm.jsonl`, what a warm start imitates; `read.jsonl`, held-out questions with the tool's
    result, which have to be read.
    """
    draw = random.Random(1)
    width = LARGEST - SMALLEST + 1
    drawn = draw.sample(range(width * width), PRODUCTS + HELD_OUT)
    pairs = [(SMALLEST + one // width, SMALLEST + one % width) for one in drawn]
    rows = [{"prompt": f"{a}*{b}", "answer": str(a * b)} for a, b in pairs]
    test = rows[:HELD_OUT]
    train = rows[HELD_OUT:]
    warm = [row for one in train for row in _imitated(one, draw)]
    write_tool_tokenizer(folder / "model")
    return write_rows(
        folder, train=train, test=test, warm=warm, read=[_with_result(one) for one in test]
    )


def _imitated(row: dict[str, str], draw: random.Random) -> Iterator[JsonObject]:
    if draw.random() < CALLS:
        yield {**row, "answer": f"{CALL_START}{row['prompt']}{CALL_END}"}
        yield _with_result(row)
    else:
        yield {**row, "answer": str(round(int(row["answer"]), GUESSED))}


def _with_result(row: dict[str, str]) -> JsonObject:
    """The question, a call and what the tool has said to it, as the prompt of the answer."""
    function = {"name": "calculate", "arguments": {"expression": row["prompt"]}}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    result = {"role": "tool", "name": "calculate", "content": row["answer"]}
    return {**row, "prompt": [{"role": "user", "content": row["prompt"]}, call, result]}


def write_tool_tokenizer(folder: Path) -> None:
    """A tokenizer of characters and of the pieces of chats, its template, and the config.json of a
    model for it.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = {token: number for number, token in enumerate([*SPECIAL, *PIECES, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token=TEXT_END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in SPECIAL]
    )
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in PIECES])
    save_tokenizer(tokenizer, folder, pad_token=TEXT_END, eos_token=TURN_END)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ends = {"pad_token_id": tokens[TEXT_END], "eos_token_id": tokens[TURN_END]}
    about = {
        "config.json": hf_config()
        | {"max_position_embeddings": 128, "vocab_size": len(tokens)}
        | ends,
        "generation_config.json": ends,
    }
    for name, content in about.items():
        write_json(folder / name, content)
