"""Sizes and features of a supported model, read from config.json and checked; LoRA. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.bounds import did_you_mean
from megatron_rl.config.schema import ALL_LINEAR, LoraSection

HfConfig = Mapping[str, Any]  # content of config.json
ADAPTER = "lora"  # its name in its layer
ADAPTER_KEY = f".{ADAPTER}."  # in the names of adapters under megatron-core
# model_type in config.json -> features that every model of the family has
FAMILIES: dict[str, frozenset[str]] = {
    "llama": frozenset(),
    "qwen2": frozenset({"qkv_bias"}),
    "qwen3": frozenset({"qk_norm"}),
    "qwen3_moe": frozenset({"qk_norm", "moe", "swiglu_experts"}),
    "mixtral": frozenset({"moe", "w123_experts"}),
    "ernie4_5": frozenset({"rotary_pairs"}),  # rotary embeddings turn neighbouring channels
    "phi3": frozenset(
        {"joined"}
    ),  # Phi-4 too; query, key and value are one tensor, gate and up another
}


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: a weight [N, K] becomes weight + alpha / rank * B [N, rank] A [rank, K].

    The mapping table gives both names and shards (mapping.adapters): B's rows lie as the weight's,
    so do A's columns.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def of(cls, section: LoraSection) -> Lora | None:
        if section.rank:
            return cls(section.rank, section.alpha, tuple(section.targets))
        return None

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, hf: str) -> bool:
        """True if the linear layer behind a Hugging Face name is a target."""
        return ALL_LINEAR in self.targets or hf.split(".")[-2] in self.targets


@dataclass(frozen=True)
class ModelShape:
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    experts: int = 0
    expert_ffn: int = 0
    # layers of a mixture-of-experts model without experts
    dense_layers: frozenset[int] = frozenset()
    features: frozenset[str] = frozenset()
    lora: Lora | None = None  # the learner's, which trains nothing else

    @classmethod
    def from_hf(cls, hf_config: HfConfig) -> ModelShape:
        family = str(hf_config.get("model_type", ""))
        if family not in FAMILIES:
            hint = did_you_mean(family, FAMILIES, "; did you mean {!r}")
            raise ValueError(
                f"model_type {family!r} is not supported{hint} (supported: {', '.join(FAMILIES)})"
            )
        missing = [key for key in _REQUIRED if hf_config.get(key) is None]
        if missing:
            raise ValueError(f"config.json of a {family} model lacks {', '.join(missing)}")
        wrong = list(_misfits(hf_config))
        if wrong:
            raise ValueError("; ".join(wrong))
        features = set(FAMILIES[family])
        if family != "qwen2" and hf_config.get("attention_bias"):
            features |= {"qkv_bias", "proj_bias"}
        if hf_config.get("mlp_bias"):
            features.add("mlp_bias")
        if family == "ernie4_5" and hf_config.get("use_bias"):
            features |= {"qkv_bias", "proj_bias", "mlp_bias"}
        layers = int(hf_config["num_hidden_layers"])
        heads = int(hf_config["num_attention_heads"])
        experts = 0
        if "moe" in features:
            experts = int(hf_config.get("num_experts") or hf_config.get("num_local_experts") or 0)
            if experts == 0:
                raise ValueError(
                    f"config.json of a {family} model lacks num_experts / num_local_experts"
                )
        return cls(
            family=family,
            layers=layers,
            hidden=int(hf_config["hidden_size"]),
            heads=heads,
            kv_heads=int(hf_config.get("num_key_value_heads") or heads),
            head_dim=int(hf_config.get("head_dim") or int(hf_config["hidden_size"]) // heads),
            ffn=int(hf_config["intermediate_size"]),
            vocab=int(hf_config["vocab_size"]),
            tied=bool(hf_config.get("tie_word_embeddings", False)),
            experts=experts,
            expert_ffn=int(hf_config.get("moe_intermediate_size") or hf_config["intermediate_size"])
            if experts
            else 0,
            dense_layers=_dense_layers(hf_config, layers) if experts else frozenset(),
            features=frozenset(features),
        )

    def has(self, feature: str, layer: int | None = None) -> bool:
        """True if the model (or this layer of it) has a feature that a mapping row needs."""
        moe = "moe" in self.features and layer not in self.dense_layers
        if feature in ("moe", "swiglu_experts", "w123_experts"):
            return moe and feature in self.features
        joined = "joined" in self.features
        derived = {
            "tied": self.tied,
            "untied": not self.tied,
            "dense_mlp": not moe,
            "dense_mlp_bias": not moe and "mlp_bias" in self.features,
            "joined_qkv": joined,
            "separate_qkv": not joined,
            "joined_mlp": not moe and joined,
            "separate_mlp": not moe and not joined,
        }
        return derived.get(feature, feature in self.features)

    def size(self, dim: str) -> int:
        """The length of a named dimension in the mapping table."""
        derived = {
            "q": self.heads * self.head_dim,
            "kv": self.kv_heads * self.head_dim,
            "qkv": (self.heads + 2 * self.kv_heads) * self.head_dim,
            "gate_up": 2 * self.ffn,
        }
        if dim in derived:
            return derived[dim]
        return int(getattr(self, dim))


_REQUIRED = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
)
# far above any model; beyond it a number is a mistake, and working with it would take the machine
_LARGEST = {
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1 << 12,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 30,
    "num_experts": 1024,
    "num_local_experts": 1024,
    "moe_intermediate_size": 1 << 20,
}


def _misfits(hf_config: HfConfig) -> Iterator[str]:
    """Problems with the sizes in a config.json, one by one and together."""
    given = hf_config.get
    found = [
        f"{key} is {size!r}, expected a whole number from 1 to {largest}"
        for key, largest in _LARGEST.items()
        if (size := given(key)) is not None and not (type(size) is int and 1 <= size <= largest)
    ]
    yield from found
    if found:
        return
    heads = hf_config["num_attention_heads"]
    groups = given("num_key_value_heads")
    hidden = hf_config["hidden_size"]
    if heads % (groups or heads):
        yield f"num_key_value_heads is {groups}, which does not divide {heads} attention heads"
    if given("head_dim") is None and hidden % heads:
        yield f"hidden_size is {hidden}, which does not divide over {heads} attention heads, and there is no head_dim"
    width = given("head_dim") or hidden // heads
    if width % 2:
        yield f"head_dim is {width}, but rotary embeddings turn pairs of channels"


def _dense_layers(hf_config: HfConfig, layers: int) -> frozenset[int]:
    """Qwen-style mixtures may keep some layers dense: listed ones, and all but every n-th."""
    listed = set(hf_config.get("mlp_only_layers") or ())
    every = int(hf_config.get("decoder_sparse_step") or 1)
    return frozenset(
        layer for layer in range(layers) if layer in listed or (layer + 1) % every != 0
    )
