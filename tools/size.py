"""Size of the tree against the bounds of tools/size.yaml: `make lint` runs it.

python tools/size.py [--list]     exit status 1 where a bound is broken; --list names the largest
files and functions
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_rl.config import from_mapping, to_yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_rl"
COUNTED = {"package": "megatron_rl", "test": "tests", "tool": "tools"}
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
TINY = 60  # lines


@dataclass(frozen=True)
class Module:
    path: Path
    lines: int
    tokens: int  # without comments and layout
    filled: int  # lines that are not blank
    imports: int  # lines
    functions: dict[str, int]  # name -> lines

    @classmethod
    def read(cls, path: Path) -> Module:
        text = path.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text)))
        imports = {
            line
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        functions = {
            node.name: (node.end_lineno or node.lineno) - node.lineno + 1
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        found = tokenize.generate_tokens(io.StringIO(text).readline)
        tokens = sum(one.type not in LAYOUT for one in found)
        filled = sum(bool(line.strip()) for line in text.splitlines())
        return cls(
            path,
            text.count("\n"),
            tokens,
            filled,
            len(imports),
            functions,
        )


def modules(folder: Path) -> list[Module]:
    return [Module.read(path) for path in sorted(folder.rglob("*.py"))]


def leaves(section: object) -> int:
    """Keys of a configuration that hold a value."""
    if isinstance(section, dict) and section:
        return sum(leaves(value) for value in section.values())
    return 1


def package_depths(found: list[Module]) -> tuple[dict[str, int], set[str]]:
    """Return the depth of the imports inside each package, where a module that imports none of its
    package has depth 1; and the modules in import cycles within a package. Imports that only a type
    checker follows count.
    """
    packages: dict[str, dict[str, set[str]]] = defaultdict(dict)
    for one in found:
        name = ".".join(one.path.relative_to(ROOT).with_suffix("").parts)
        packages[name.rpartition(".")[0]][name] = set(_imported(one.path))
    cycles: set[str] = set()

    def depth(name: str, package: dict[str, set[str]], above: tuple[str, ...]) -> int:
        if name in above:
            cycles.update(above[above.index(name) :])
            return 0
        below = package[name] & package.keys() - {name}
        return 1 + max((depth(other, package, (*above, name)) for other in below), default=0)

    return {
        package: max(depth(name, inside, ()) for name in inside)
        for package, inside in packages.items()
    }, cycles


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def measure() -> dict[str, float]:
    found = {name: modules(ROOT / folder) for name, folder in COUNTED.items()}
    package = found["package"]
    tokens = {name: sum(one.tokens for one in those) for name, those in found.items()}
    filled = {name: sum(one.filled for one in those) for name, those in found.items()}
    sizes = sorted(one.lines for one in package)
    depths, cycles = package_depths(package)
    return {
        **{f"{name} tokens": count for name, count in tokens.items()},
        **{f"{name} tokens a line": round(tokens[name] / filled[name], 2) for name in found},
        "package files": len(package),
        "config keys": leaves(yaml.safe_load(to_yaml(from_mapping({})))),
        "import percent": round(100 * sum(one.imports for one in package) / max(1, sum(sizes)), 1),
        "largest file": sizes[-1],
        "95th percentile of files": sizes[int(0.95 * (len(sizes) - 1))],
        "longest function": max(length for one in package for length in one.functions.values()),
        "deepest package": max(depths.values()),
        "modules in import cycles": len(cycles),
        "files under 60 lines": sum(one.lines < TINY for one in package),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="name the largest files, longest functions, deepest packages",
    )
    listed = parser.parse_args().list
    written = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    bounds = written["bounds"]
    broken = False
    for name, value in measure().items():
        bound = bounds.get(name)
        over = bound is not None and value > bound
        broken |= over
        limit = "" if bound is None else f"  of {bound}"
        print(f"{name:<26} {value:>8}{limit}{'  OVER' * over}")
    if listed:
        package = modules(PACKAGE)
        for one in sorted(package, key=lambda each: -each.lines)[:12]:
            print(f"{one.lines:>6}  {one.path.relative_to(ROOT)}")
        longest = [
            (size, str(one.path.relative_to(ROOT)), name)
            for one in package
            for name, size in one.functions.items()
        ]
        longest.sort(reverse=True)
        print("\n".join(f"{size:>6}  {path}: {name}" for size, path, name in longest[:8]))
        depths, cycles = package_depths(package)
        for name, depth in sorted(depths.items(), key=lambda each: -each[1])[:6]:
            print(f"{depth:>6} package depth  {name}")
        print("\n".join(f"import cycle  {name}" for name in sorted(cycles)))
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
