"""A model's folder whose parts do not belong together is refused by the dry run, in its first
second.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import Command, hf_shapes

from megatron_rl.models import weight_files
from megatron_rl.models.hf_folder import HfFolder, write_folder
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape

MODEL = Path("data/toy/model")
WEIGHTS = MODEL / "model.safetensors"
NORM = "model.norm.weight"


@pytest.fixture
def folder(place: Path) -> None:
    """The toy's folder with weights, and the working folder beside it."""
    write(tensors())


def tensors() -> dict[str, torch.Tensor]:
    shape = ModelShape.from_hf(read_hf_config(MODEL))
    named = hf_shapes(shape)
    return {name: torch.full(size, 0.5, dtype=torch.bfloat16) for name, size in named.items()}


def write(weights: dict[str, torch.Tensor], **limits: int) -> None:
    write_folder(MODEL, weights, read_hf_config(MODEL), **limits)


PRETRAINED = ("quantization=none", "model.init=pretrained")
in_its_folder = pytest.mark.usefixtures("folder")


def change(**changes: object) -> None:
    (MODEL / "config.json").write_text(
        json.dumps(json.loads((MODEL / "config.json").read_text()) | changes)
    )


@in_its_folder
def test_parts_that_belong_together_pass(command: Command) -> None:
    command.dry_run(*PRETRAINED)
    change(tie_word_embeddings=False)
    write(tensors())
    command.dry_run(*PRETRAINED)


LIES = [
    ({"num_hidden_layers": 1}, "holds the weights of 2"),
    ({"num_hidden_layers": 100_000_000}, "num_hidden_layers is 100000000"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
    ({"hidden_size": 64.0}, "hidden_size is 64.0"),
    ({"hidden_size": 64}, "model.embed_tokens.weight and 19 more tensors"),
    ({"hidden_size": 126, "head_dim": None}, "hidden_size is 126"),
    ({"vocab_size": 12}, "vocab_size of config.json is 12"),
    ({"vocab_size": 50}, "config.json says [50, 128]"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
    ({"head_dim": 33}, "head_dim is 33"),
    ({"intermediate_size": 255}, "mlp.gate_proj.weight and 5 more tensors"),
    ({"tie_word_embeddings": False}, "lacks lm_head.weight"),
    ({"model_type": "qwen2"}, "lacks model.layers.0.self_attn.q_proj.bias and 5 more"),
    ({"model_type": "llama"}, "holds model.layers.0.self_attn.k_norm.weight and 3 more"),
    ({"model_type": "qwen3_moe", "num_experts": 1 << 40}, "num_experts is 1099511627776"),
    ({"eos_token_id": [1, -3]}, "config.json is [1, -3]"),
    ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
    (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 1,
                "original_max_position_embeddings": 64,
            }
        },
        "low_freq_factor of config.json is 4",
    ),
    ({"rms_norm_eps": None}, "lacks rms_norm_eps"),
]


@pytest.mark.fault(
    "config.json says what weights or tokenizer deny", "the dry run names the key and both values"
)
@in_its_folder
@pytest.mark.parametrize(
    ("changes", "said"),
    LIES,
    ids=[str(lie[0])[:60] for lie in LIES],
)
def test_lies_of_config_json(command: Command, changes: dict, said: str) -> None:
    change(**changes)
    assert said in command.refused(*PRETRAINED)


def rewrite(edit: Callable[[dict], object]) -> None:
    """The weights' header, edited."""
    raw = WEIGHTS.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    WEIGHTS.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def norm(**changes: object) -> None:
    rewrite(lambda header: header[NORM].update(changes))


def without(*names: str) -> None:
    write({name: tensor for name, tensor in tensors().items() if name not in names})


def in_shards() -> None:
    WEIGHTS.unlink()
    write(tensors(), max_file_bytes=50_000)


def lose_a_shard() -> None:
    in_shards()
    sorted(MODEL.glob("*.safetensors"))[0].unlink()


def index(content: object) -> None:
    in_shards()
    (MODEL / weight_files.INDEX).write_text(
        content if isinstance(content, str) else json.dumps(content)
    )


def untied_head() -> None:
    named = tensors()
    write(named | {"lm_head.weight": torch.zeros_like(named["model.embed_tokens.weight"])})


def as_int8() -> None:
    write(tensors() | {NORM: torch.zeros(128, dtype=torch.int8)})


def header(content: bytes, length: int | None = None) -> None:
    WEIGHTS.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content)


DAMAGES = {
    "a tensor is missing": (lambda: without(NORM), f"lacks {NORM}; config.json promises it"),
    "tensors are missing": (
        lambda: without(NORM, "model.layers.1.mlp.up_proj.weight"),
        "lacks model.layers.1.mlp.up",
    ),
    "a shard is missing": (lose_a_shard, "names model-0000"),
    "the file ends early": (
        lambda: WEIGHTS.write_bytes(WEIGHTS.read_bytes()[:-100]),
        "is cut off or padded",
    ),
    "the file is empty": (lambda: WEIGHTS.write_bytes(b""), "safetensors header"),
    "the header ends early": (lambda: WEIGHTS.write_bytes(WEIGHTS.read_bytes()[:60]), "is cut off"),
    "the header is no JSON": (lambda: header(b"{{{{"), "no readable safetensors"),
    "the header is a list": (lambda: header(b"[]"), "no readable safetensors"),
    "the header is deep": (lambda: header(b"[" * 200_000), "no readable safetensors"),
    "the header is huge": (lambda: header(bytes(65 << 20), 64 << 20), "a header of 67108864 bytes"),
    "a shape is another": (lambda: norm(shape=[64, 2]), "[64, 2], config.json says [128]"),
    "bytes do not fit the shape": (lambda: norm(shape=[129]), "is BF16 [129], but has 256 bytes"),
    "two tensors overlap": (
        lambda: rewrite(lambda header: header.update(more={**header[NORM]})),
        "those before it end at",
    ),
    "a place is negative": (lambda: norm(data_offsets=[-256, 0]), "no dtype, shape"),
    "a tensor too many": (
        lambda: rewrite(lambda header: header.update({"model.layers.7.x": header.pop(NORM)})),
        "the weights of 8",
    ),
    "weights are quantized": (as_int8, f"holds {NORM} as I8, expected one of"),
    "a tied model has a head of its own": (untied_head, "lm_head.weight of data/toy/model differs"),
    "the index is a list": (lambda: index([]), "holds a list, expected keys"),
    "the index is deep": (lambda: index("[" * 100_000), "nested too deeply"),
    **{
        f"the index names {name!r}": (
            lambda name=name: index({"weight_map": {NORM: name}}),
            "no weight_map of tensors",
        )
        for name in ("..", "", "a/b", "../x.safetensors", "/x.safetensors", 5)
    },
}


@pytest.mark.fault(
    "weights are missing, cut short, misshapen or lie", "the dry run names file and tensor"
)
@in_its_folder
@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_cannot_be_loaded(command: Command, damage: str) -> None:
    do, said = DAMAGES[damage]
    do()
    assert said in command.refused(*PRETRAINED)


@in_its_folder
def test_shards_and_what_is_harmless_pass(command: Command) -> None:
    in_shards()
    command.dry_run(*PRETRAINED)
    assert len(HfFolder(MODEL).files) > 1
    for file in (*MODEL.glob("*.safetensors"), MODEL / weight_files.INDEX):
        file.unlink()
    named = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}
    write(named | {"lm_head.weight": named["model.embed_tokens.weight"].clone()})
    command.dry_run(*PRETRAINED)


@pytest.mark.fault("a file of a model's folder is damaged", "the dry run names the file")
@in_its_folder
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
@pytest.mark.parametrize(
    "content",
    [
        "[1]",
        "{",
        "[" * 100_000,
        "5",
        "\x00",
        "1" * 6000,
    ],
    ids=range(6),
)
def test_files_that_are_not_what_they_should_be(command: Command, name: str, content: str) -> None:
    (MODEL / name).write_text(content)
    assert f"model.path: data/toy/model/{name}" in command.refused(*PRETRAINED)


@pytest.mark.fault("config.json has 100 MB", "it is refused unread")
@in_its_folder
def test_a_huge_config(command: Command) -> None:
    with (MODEL / "config.json").open("r+b") as file:
        file.truncate(100 << 20)
    assert "104857600 bytes" in command.refused(*PRETRAINED)


@pytest.mark.fault("the tokenizer has tokens beyond the vocabulary", "the dry run names the first")
@in_its_folder
def test_added_tokens(command: Command) -> None:
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][0], "id": 17, "content": "<think>"}
    )
    (MODEL / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "'<think>' (id 17)" in command.refused(*PRETRAINED)
    (MODEL / "generation_config.json").write_text('{"eos_token_id": [1, 99]}')
    assert "generation_config.json is [1, 99]" in command.refused(*PRETRAINED)
