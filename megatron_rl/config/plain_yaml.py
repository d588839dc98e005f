"""Reads and writes recipes' YAML: `1e-4` is a number, `0.5_5` and dates are text; doubled keys,
huge texts refused.
"""

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

CONF = Path(__file__).resolve().parents[2] / "conf"
PLAIN_FLOAT = re.compile(
    r"^([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
# far above any recipe; beyond it a text was made to keep its reader busy
LARGEST_TEXT = 1 << 20
MOST_NODES = 10_000  # what aliases repeat counts each time
DEEPEST = 32
# Configuration is free of secrets by design; what it passes on (settings, keys of megatron-core,
# vLLM) might hold one
SECRET_KEY = re.compile(
    r"(^|_)(api_?key|secret|password|passwd|credentials?|bearer|(hf|auth|access)_?token)s?$", re.I
)


class PlainLoader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as text, `0.5_5` as 0.55 and `010` as 8; here digits are decimal and
    stand alone.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes = self._nodes + 1
        self._depth = self._depth + 1
        if self._depth > DEEPEST or self._nodes > MOST_NODES:
            if self._depth > DEEPEST:
                problem = f"nested more than {DEEPEST} deep"
            else:
                problem = f"more than {MOST_NODES} values"
            raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _weigh(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: list[object] = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
            seen.append(key.value)
        return super().construct_mapping(node, deep)


def _weigh(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """(Nodes, depth) with every alias written out; what is too large, or holds itself, is
    refused.
    """
    if id(node) in known:
        nodes, depth = known[id(node)]
        if nodes == 0:
            problem = "an alias in it refers to what it is part of"
            raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        return nodes, depth
    known[id(node)] = (0, 0)
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    else:
        parts = node.value if isinstance(node, yaml.SequenceNode) else []
    weights = [_weigh(part, known) for part in parts]
    nodes = 1 + sum(each for each, _ in weights)
    depth = 1 + max((each for _, each in weights), default=0)
    if nodes > MOST_NODES or depth > DEEPEST:
        problem = f"with its aliases it has more than {MOST_NODES} values, or is nested more than {DEEPEST} deep"
        raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
    known[id(node)] = (nodes, depth)
    return nodes, depth


_REPLACED = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9]\d*)$"), list("-+0123456789")
)
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:float", PLAIN_FLOAT, list("-+.0123456789"))


def read_yaml(text: str) -> Any:
    """ValueError and yaml.YAMLError say what is wrong with the text."""
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"{len(text)} characters, expected at most {LARGEST_TEXT}")
    return yaml.load(text, Loader=PlainLoader)


class _PlainDumper(yaml.SafeDumper):
    """Quotes text that would be read back as a number."""


_PlainDumper.add_implicit_resolver("tag:yaml.org,2002:float", PLAIN_FLOAT, list("-+.0123456789"))


def write_yaml(node: Any, **style: Any) -> str:
    """YAML of printable characters: line separators and marks that reorder a line are escaped."""
    style |= {"Dumper": _PlainDumper, "sort_keys": False}
    text: str = yaml.dump(_plain(node), allow_unicode=True, **style)
    if not text.replace("\n", "").isprintable():
        text = yaml.dump(_plain(node), **style)
    return text


def write_line(node: Any) -> str:
    """A value on one line, as an override takes it."""
    return " ".join(write_yaml(node, default_flow_style=True).removesuffix("...\n").split())


def _plain(node: Any) -> Any:
    """Enum members as the text that recipes write."""
    if isinstance(node, dict):
        return {name: _plain(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    if isinstance(node, str):
        return str(node)
    return node


def redact(value: Any) -> Any:
    """The value without what its keys call secrets."""
    if isinstance(value, Mapping):
        return {
            key: "(hidden)"
            if SECRET_KEY.search(str(key)) and item not in (None, "")
            else redact(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [redact(item) for item in value]
    return value
