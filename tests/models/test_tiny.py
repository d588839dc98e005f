"""A tiny model for your own task: a tokenizer for any text, the requested family, named errors."""

import json
import string
from pathlib import Path

import pytest
from helpers import Command, write_lines

from megatron_rl.config.plain_yaml import CONF
from megatron_rl.config.schema import LearnerSection
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.data.toy import write_chat_tokenizer, write_tokenizer
from megatron_rl.models.mapping import parameters
from megatron_rl.models.model import Model

ROWS = [
    {"prompt": "Ordne: züge äste", "answer": "äste züge"},
    {"prompt": [{"role": "user", "content": "日"}], "n": 1},
]
TEXTS = (
    string.printable,
    "züge äste 日",
    "никогда 🎉 \x00\x7f",
    "users, abuser; user system",
    "<0x41> <pad>",
)


@pytest.fixture
def rows(empty: Path) -> Path:
    return write_lines(empty / "rows.jsonl", ROWS)


@pytest.fixture
def published(empty: Path) -> Path:
    """A folder as a model's authors leave one: BPE, a template in a file of its own, two tokens
    that end an answer.
    """
    folder = empty / "published"
    write_chat_tokenizer(folder, ["Reverse: stressed"])
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (folder / "model.safetensors").write_text("weights")
    return folder


def made(command: Command, tokenizer: Path, *words: str) -> tuple[FolderTokenizer, Model]:
    command("toy", "own", "--tokenizer", tokenizer, *words)
    return FolderTokenizer(Path("own/model")), Model.read("own/model", LearnerSection())


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_a_tokenizer_of_rows(
    rows: Path, command: Command, text: str
) -> None:
    tokenizer, _ = made(command, rows)
    assert tokenizer.decode([tokenizer.encode(text)]) == [text]


def test_the_rows_characters_are_a_token_each_and_so_are_roles(
    rows: Path, command: Command
) -> None:
    tokenizer, model = made(command, rows)
    assert len(tokenizer.encode("züge äste 日")) == 11
    assert len(tokenizer.encode("abuser")) == 6  # no role in the middle of a word
    assert len(tokenizer.encode("й")) == 2  # in no row: bytes
    # eight are the template's
    assert len(tokenizer.encode([{"role": "user", "content": "日"}])) == 9
    assert tokenizer.stop_token_ids == (tokenizer.encode("<|im_end|>")[0],)
    assert (model.shape.vocab, model.hf_config["max_position_embeddings"]) == (320, 2048)


def test_a_published_tokenizer_is_taken_as_it_is(published: Path, command: Command) -> None:
    tokenizer, model = made(command, published, "--like", "Llama-3.1-8B-Instruct")
    assert tokenizer.text([{"role": "user", "content": "a"}]) == "[a]"
    assert tokenizer.encode("Reverse: stressed") == FolderTokenizer(published).encode(
        "Reverse: stressed"
    )
    assert tokenizer.stop_token_ids == (2, 0)
    assert model.hf_config["eos_token_id"] == [2, 0]
    assert model.shape.vocab % 64 == 0
    assert (
        0
        <= model.shape.vocab - 64
        < len(json.loads((published / "tokenizer.json").read_text())["model"]["vocab"])
    )
    assert not Path("own/model/model.safetensors").exists()


@pytest.mark.parametrize("card", sorted(path.stem for path in (CONF / "model").glob("*.json")))
def test_a_model_of_every_family_loads_in_transformers(
    rows: Path, command: Command, card: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = made(command, rows, "--like", card)
    config = AutoConfig.from_pretrained("own/model")
    assert AutoModelForCausalLM.from_config(config).num_parameters() == parameters(model.shape)
    # each family's own class splits it otherwise
    said = [{"role": "user", "content": "abuser's züge äste 日 й 12\n"}]
    ids = AutoTokenizer.from_pretrained("own/model").apply_chat_template(
        said, add_generation_prompt=True
    )["input_ids"]
    assert ids == tokenizer.encode(said)


def test_what_cannot_be_made_is_named(rows: Path, published: Path, command: Command) -> None:
    def refused(tokenizer: str, *words: str) -> str:
        return command("toy", "own", "--tokenizer", tokenizer, *words, status=2)

    write_tokenizer(Path("bare"))
    assert "'nowhere'" in refused("nowhere")
    assert "chat_template.jinja" in refused("bare")
    assert "--like: " in refused("rows.jsonl", "--like", "Qwen9")
    (published / "tokenizer.json").write_text("{")
    assert "published/tokenizer.json" in refused("published")
    write_lines(rows, ROWS, "{")
    assert "line 3 of rows.jsonl" in refused("rows.jsonl")
    assert not Path("own").exists()
    Path("own/model").mkdir(parents=True)
    assert "own/model: " in refused("published")
