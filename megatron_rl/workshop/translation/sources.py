"""Reader of another project's file in the form it ships: YAML with its bases, TOML, a script's command line, Python."""

import ast
import operator
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.config.plain_yaml import read_yaml
from megatron_rl.workshop.translation.keys import TranslationError, Unset
from megatron_rl.workshop.translation.shell import Word, command_line, commands_with
from megatron_rl.workshop.translation.table import Table

ASSIGNED = re.compile(r"^[+~]{0,2}([A-Za-z_][\w.@/-]*)=(.*)$", re.DOTALL)
NUMBER = re.compile(r"^-[\d.]")
DEEPEST = 16  # bases of bases
# of the resolvers that projects register, those that are plain arithmetic
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "mul": operator.mul, "div": operator.truediv, "max": lambda a, b: max(a, b),
    "min": lambda a, b: min(a, b),
}  # fmt: skip
FORMS = {".toml": "TOML", ".py": "Python"} | dict.fromkeys((".sh", ".bash", ".sbatch", ".slurm"), "shell")


def read_native(path: Path, rules: Table, given: Mapping[str, str]) -> Mapping[str, Any]:
    """What a file says; `given`: variables and keys of the command line."""
    form = FORMS.get(path.suffix, "YAML")
    found: Any
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        if form == "TOML":
            found = tomllib.loads(text)
        elif form == "Python":
            found = _python(path, text, rules, given)
        elif form == "shell" or text.startswith("#!"):
            found = arguments(command_line(path, text, rules.command, given))
        else:
            found = _layered(path, read_yaml(text), ())
            found = _resolved(found) if "${" in text or "${" in str(found) else found
    except (OSError, UnicodeDecodeError) as error:
        raise TranslationError(f"{path}: not readable as text: {error}") from None
    except TranslationError:
        raise
    except (yaml.YAMLError, ValueError, SyntaxError) as error:
        raise TranslationError(f"{path}: not valid {form} ({error})") from None
    if found is not None and not isinstance(found, Mapping):
        raise TranslationError(f"{path}: expected keys and values, got {type(found).__name__}")
    return found or {}


def arguments(words: Iterable[Word]) -> dict[str, Any]:
    """Flags with their values and `key=value` words; of a key that is given twice the last one counts."""
    found: dict[str, Any] = {}
    flag = ""
    for word in words:
        text = word if isinstance(word, str) else word.text
        assigned = ASSIGNED.match(text.lstrip("-") if text.startswith("--") else text)
        name, value = (assigned[1], assigned[2]) if assigned else (text, "")
        if not isinstance(word, str) and text.endswith("[@]}"):  # arguments that nobody knows
            found[text] = word
            flag = ""
        elif text.startswith("--") or (text.startswith("-") and not NUMBER.match(text)):
            flag = "" if assigned else text.lstrip("-")
            found[name.lstrip("-")] = _value(word, value) if assigned else True
        elif assigned and not flag:
            found[name] = _value(word, value)
        elif flag:
            one = _value(word, text)
            found[flag] = one if found[flag] is True else [*_listed(found[flag]), one]
        else:
            found[text] = word
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def scalar(text: str) -> Any:
    """A word as YAML reads it; what is no YAML is text."""
    try:
        return read_yaml(text)
    except (ValueError, yaml.YAMLError):
        return text


def _value(word: Word, text: str) -> Any:
    return scalar(text) if isinstance(word, str) else Unset(text, word.names)


def _layered(path: Path, mapping: Any, seen: tuple[Path, ...]) -> Any:
    """Over the files that its `defaults` names, where they are paths."""
    named = mapping.get("defaults") if isinstance(mapping, dict) else None
    bases = [one for one in _listed(named) if isinstance(one, str) and one.endswith((".yaml", ".yml"))]
    if not bases:
        return mapping
    if path in seen or len(seen) > DEEPEST:
        raise TranslationError(f"{path}: defaults leads back to the file itself")
    whole: dict[str, Any] = {}
    for base in (path.parent / name for name in bases):
        if not base.is_file():
            raise TranslationError(f"{path}: defaults names {base.name}, which is not at {base}; fetch that file too")
        whole = merged(whole, _layered(base, read_yaml(base.read_text()), (*seen, path)) or {})
    return merged(whole, {key: value for key, value in mapping.items() if key != "defaults"})


def merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: merged(below.get(key), value) for key, value in above.items()}


def _resolved(mapping: Any) -> Any:
    for name, function in ARITHMETIC.items():
        OmegaConf.register_resolver(name, function, replace=True)
    return _plain(OmegaConf.create(mapping))


def _plain(node: Any) -> Any:
    if isinstance(node, DictConfig):
        return {str(key): _plain_item(node, key) for key in node}
    return [_plain_item(node, place) for place in range(len(node))] if isinstance(node, ListConfig) else node


def _plain_item(node: Any, key: Any) -> Any:
    try:
        return None if OmegaConf.is_missing(node, key) else _plain(node[key])
    except OmegaConfBaseException:
        text = str(OmegaConf.to_container(node, resolve=False)[key])  # type: ignore[index]
        return Unset(text, (text,))


def _python(path: Path, text: str, rules: Table, given: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of the calls that make a configuration; without any, the command line of the module's docstring."""
    tree = ast.parse(text)
    found: dict[str, Any] = {}
    configured = False
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if (section := rules.calls.get(name)) is not None:
            configured |= section == ""
            found |= {f"{section}.{one.arg}".strip("."): _literal(one.value) for one in call.keywords if one.arg}
            if section and call.args:
                found.setdefault(section, _literal(call.args[0]))
    if not configured:
        lines = "\n".join(commands_with(ast.get_docstring(tree) or "", rules.command))
        found |= arguments(command_line(path, lines, rules.command, given))
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Unset(ast.unparse(node), (ast.unparse(node),))
