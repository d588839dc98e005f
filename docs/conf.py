"""Sphinx configuration of the documentation site: `make docs` builds it into build/docs."""

import re

from sphinx.application import Sphinx

project = "megatron-rl"
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/**.md",
    "examples/**.md",
    "recipes/README.md",
    "slurm/README.md",
    "tools/**.md",
]
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "megatron-rl"
myst_heading_anchors = 4
html_show_copyright = False
nitpicky = True  # an unknown page or anchor is an error


def add_navigation(app: Sphinx, name: str, source: list[str]) -> None:
    """Make the sections of the index the side bar; other pages are reached by links."""
    if name != root_doc:
        source[0] = f"---\norphan: true\n---\n{source[0]}"
        return
    for title, section in re.findall(r"^\*\*(.+?)\*\*\n(.*?)(?=^\*\*|\Z)", source[0], re.M | re.S):
        pages = re.findall(r"\]\(([\w/-]+)\.md\)", section)
        source[0] += (
            f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"
        )


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
