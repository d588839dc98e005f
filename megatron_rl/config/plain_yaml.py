"""Reads and writes recipes' YAML: `1e-4` is a number, `0.5_5` and dates are text; doubled keys
are refused.
"""

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

Settings = dict[str, Any]  # of YAML: keys, or sections of them
# with conf/, recipes/ and constraints/: links in the repository, copies in a wheel
PACKAGE = Path(__file__).resolve().parents[1]
CONF = PACKAGE / "conf"
PLAIN_FLOAT = re.compile(
    r"^([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
# Configuration is free of secrets by design; what it passes on (settings, keys of megatron-core,
# vLLM) might hold one
SECRET_KEY = re.compile(
    r"(^|_)(api_?key|secret|password|passwd|credentials?|bearer|(hf|auth|access)_?token)s?$", re.I
)


class PlainLoader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-4` as text, `0.5_5` as 0.55 and `010` as 8; here digits are decimal and
    stand alone.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: list[object] = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice", key.start_mark
                )
            seen.append(key.value)
        return super().construct_mapping(node, deep)


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
    """Parse YAML. Raises ValueError or yaml.YAMLError with the defect."""
    return yaml.load(text, Loader=PlainLoader)


def presets(section: str) -> dict[str, Path]:
    """Return the presets of a section by name."""
    return {path.stem: path for path in sorted((CONF / section).glob("*.yaml"))}


def read_preset(path: Path) -> Settings:
    return read_yaml(path.read_text(encoding="utf-8")) or {}


class _PlainDumper(yaml.SafeDumper):
    """Quotes text that would be read back as a number; enum members are text; no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_PlainDumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str(text)))
_PlainDumper.add_implicit_resolver("tag:yaml.org,2002:float", PLAIN_FLOAT, list("-+.0123456789"))


def write_yaml(node: Any, **style: Any) -> str:
    """YAML of printable characters: line separators and marks that reorder a line are escaped."""
    style |= {"Dumper": _PlainDumper, "sort_keys": False}
    text: str = yaml.dump(node, allow_unicode=True, **style)
    if not text.replace("\n", "").isprintable():
        text = yaml.dump(node, **style)
    return text


def write_line(node: Any) -> str:
    """Write a value on one line, in the form of an override."""
    return " ".join(write_yaml(node, default_flow_style=True).removesuffix("...\n").split())


def redact(value: Any) -> Any:
    """Return the value without entries whose keys name secrets."""
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
