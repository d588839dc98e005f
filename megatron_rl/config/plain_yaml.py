"""YAML as recipes mean it: `1e-4` is a number, `0.5_5` and dates are text, and no key stands twice in a section."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

PLAIN_FLOAT = re.compile(r"^([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$")


class PlainLoader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as text, `0.5_5` as 0.55 and `010` as 8; here digits are decimal and stand alone."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: list[object] = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.append(key.value)
        return super().construct_mapping(node, deep)


_REPLACED = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9]\d*)$"), list("-+0123456789"))
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:float", PLAIN_FLOAT, list("-+.0123456789"))


def read_yaml(text: str) -> Any:
    return yaml.load(text, Loader=PlainLoader)


class _PlainDumper(yaml.SafeDumper):
    """Quotes text that would be read back as a number."""


_PlainDumper.add_implicit_resolver("tag:yaml.org,2002:float", PLAIN_FLOAT, list("-+.0123456789"))


def write_yaml(node: Any) -> str:
    return yaml.dump(_plain(node), Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)


def _plain(node: Any) -> Any:
    """Enum members as the text that recipes write."""
    if isinstance(node, dict):
        return {name: _plain(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return str(node) if isinstance(node, str) else node
