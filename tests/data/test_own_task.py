"""A tiny model for a task of one's own: its tokenizer reads any text, its family is as asked, mistakes are named."""

import json
import string
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import Command, write_lines

from megatron_rl.config.load import CONF
from megatron_rl.config.schema import LearnerSection
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.data.toy import write_chat_tokenizer, write_tokenizer
from megatron_rl.models.mapping import parameters
from megatron_rl.models.model import Model

ROWS = [{"prompt": "Ordne: züge äste", "answer": "äste züge"}, {"prompt": [{"role": "user", "content": "日"}], "n": 1}]
TEXTS = (string.printable, "züge äste 日", "никогда 🎉 \x00\x7f", "users, abuser; user system", "<0x41> <pad>")


@pytest.fixture
def rows(empty: Path) -> Path:
    return write_lines(empty / "rows.jsonl", ROWS)


@pytest.fixture
def published(empty: Path) -> Path:
    """A folder as a model's authors leave one: BPE, a template in a file of its own, two tokens that end an answer."""
    folder = empty / "published"
    write_chat_tokenizer(folder, ["Reverse: stressed"])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (folder / "model.safetensors").write_text("weights")
    return folder


def made(command: Command, tokenizer: Path, *words: str) -> tuple[FolderTokenizer, Model]:
    command("toy", "own", "--tokenizer", tokenizer, *words)
    return FolderTokenizer(Path("own/model")), Model.read("own/model", LearnerSection())


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_from_a_tokenizer_of_rows(rows: Path, command: Command, text: str) -> None:
    tokenizer, _ = made(command, rows)
    assert tokenizer.decode([tokenizer.encode(text)]) == [text]


def test_the_rows_characters_are_a_token_each_and_so_are_roles(rows: Path, command: Command) -> None:
    tokenizer, model = made(command, rows)
    assert len(tokenizer.encode("züge äste 日")) == 11
    assert len(tokenizer.encode("abuser")) == 6  # no role in the middle of a word
    assert len(tokenizer.encode("й")) == 2  # in no row: bytes
    around = tokenizer.encode([{"role": "user", "content": "日"}])
    assert len(around) == len("[user/日]/[assistant/".replace("user", "1").replace("assistant", "1"))
    assert tokenizer.stop_token_ids == (tokenizer.encode("<|im_end|>")[0],)
    assert model.shape.vocab == 384
    assert model.hf_config["max_position_embeddings"] == 2048


def test_rows_of_either_file_give_the_same_tokenizer(rows: Path, command: Command) -> None:
    made(command, rows)
    pq.write_table(pa.Table.from_pylist([{"prompt": "zügeOrdn: äst", "answer": "日"}]), "rows.parquet")
    command("toy", "again", "--tokenizer", "rows.parquet")
    first, second = (Path(folder, "model", "tokenizer.json").read_bytes() for folder in ("own", "again"))
    assert first == second


def test_a_published_tokenizer_is_taken_as_it_is(published: Path, command: Command) -> None:
    tokenizer, model = made(command, published, "--like", "Llama-3.1-8B")
    assert tokenizer.text([{"role": "user", "content": "a"}]) == "[a]"
    assert tokenizer.encode("Reverse: stressed") == FolderTokenizer(published).encode("Reverse: stressed")
    assert tokenizer.stop_token_ids == (2, 0)
    assert model.hf_config["eos_token_id"] == [2, 0]
    assert model.hf_config["pad_token_id"] == 0
    highest = max(json.loads((published / "tokenizer.json").read_text())["model"]["vocab"].values())
    assert highest < model.shape.vocab <= highest + 64
    assert model.shape.vocab % 64 == 0
    assert not Path("own/model/model.safetensors").exists()


@pytest.mark.parametrize("card", sorted(path.stem for path in (CONF / "model").glob("*.json")))
def test_a_model_of_every_family_loads_in_transformers_and_in_a_recipe(rows: Path, command: Command, card: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    _, model = made(command, rows, "--like", card)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("own/model"))
    assert theirs.num_parameters() == parameters(model.shape)
    assert theirs.config.model_type == json.loads((CONF / "model" / f"{card}.json").read_text())["model_type"]
    said = AutoTokenizer.from_pretrained("own/model").apply_chat_template(ROWS[1]["prompt"], tokenize=False)
    assert said == "<|im_start|>user\n日<|im_end|>\n"


def test_what_cannot_be_made_is_named_with_the_way_out(rows: Path, published: Path, command: Command) -> None:
    def refused(tokenizer: object, *words: str) -> str:
        said = command("toy", "own", "--tokenizer", tokenizer, *words, status=2)
        assert not Path("own").exists()
        return said

    assert "--tokenizer: 'nowhere' is neither a folder" in refused("nowhere")
    (rows.parent / "rows.csv").write_text("prompt")
    assert "a file of rows (.parquet, .jsonl, .arrow)" in refused("rows.csv")
    assert "--tokenizer: conf holds no tokenizer.json; save one there" in refused(_folder("conf"))
    assert "--like: no config.json in 'Qwen9', and no card in conf/model/" in refused(rows, "--like", "Qwen9")
    odd = _folder("odd", config='{"model_type": "gpt2"}')
    assert "--like: model_type 'gpt2' is not supported" in refused(rows, "--like", str(odd))
    assert "rows.jsonl, line 3 is not JSON" in refused(write_lines(rows, ROWS, "{"))
    write_tokenizer(Path("bare"))
    assert "--tokenizer: bare has no chat template; save one there as chat_template.jinja" in refused("bare")
    (published / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    assert "--tokenizer: the chat template of published does not take" in refused("published")
    (published / "tokenizer.json").write_text("{")
    assert "--tokenizer: published/tokenizer.json is not a readable tokenizer" in refused("published")
    (Path("own") / "model").mkdir(parents=True)
    assert "own/model: is there already; remove it" in command("toy", "own", "--tokenizer", rows, status=2)


def _folder(name: str, config: str = "{}") -> Path:
    Path(name).mkdir()
    Path(name, "config.json").write_text(config)
    return Path(name)
