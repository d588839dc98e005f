"""Names of fields of megatron-core's and vLLM's dataclasses, read from source: a dry run imports
neither.
"""

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Set
from functools import cache
from pathlib import Path

from megatron_rl.config.bounds import did_you_mean


@cache
def fields_of(package: str, files: tuple[str, ...], classes: tuple[str, ...]) -> Set[str] | None:
    """Return public fields of the classes, or keys of mappings of those names; None if the package
    is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(spec.submodule_search_locations[0])
    found: set[str] = set()
    for file in files:
        for node in ast.parse((root / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                found |= {field.id for field in fields if isinstance(field, ast.Name)}
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in classes:
                found |= set(ast.literal_eval(node.value))
    return {name for name in found if not name.startswith("_")}


def schema_errors(prefix: str, whose: str, given: Iterable[str], known: Set[str]) -> Iterator[str]:
    """Yield errors for names that are not fields of `whose`."""
    for key in sorted(set(map(str, given)) - known):
        hint = did_you_mean(key, known, f"; did you mean {prefix}.{{}}?")
        yield f"{prefix}.{key}: {whose} has no such field{hint}"
