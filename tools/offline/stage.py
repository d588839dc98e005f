"""Link a folder of packages to another one without what is not carried.

    stage.py SITE STAGE LEFT_OUT

LEFT_OUT lists globs of files and folders relative to SITE. A glob with a slash is matched with the
whole path; `*.ext` and `__pycache__` with names in every folder; other names at the top alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
from fnmatch import fnmatch
from pathlib import Path


def read_globs(listed: Path) -> list[str]:
    lines = [line.strip() for line in listed.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def is_left_out(path: Path, globs: list[str]) -> bool:
    """True for a path, relative to the folder of packages, that is not carried."""
    text = str(path)
    name = path.name
    at_top = text == name
    for glob in globs:
        if "/" in glob:
            if fnmatch(text, glob):
                return True
        elif at_top or glob.startswith("*.") or glob == "__pycache__":
            if fnmatch(name, glob):
                return True
    return False


def stage(site: Path, target: Path, globs: list[str]) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for folder, folders, files in os.walk(site, followlinks=True):
        here = Path(folder).relative_to(site)
        folders[:] = [name for name in folders if not is_left_out(here / name, globs)]
        (target / here).mkdir(parents=True, exist_ok=True)
        for name in files:
            if not is_left_out(here / name, globs):
                os.link(Path(folder) / name, target / here / name, follow_symlinks=False)
    # an empty folder would be imported as a package
    for folder, _, _ in os.walk(target, topdown=False):
        if not os.listdir(folder):
            os.rmdir(folder)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("site", type=Path)
    parser.add_argument("stage", type=Path)
    parser.add_argument("left_out", type=Path)
    options = parser.parse_args()
    stage(options.site, options.stage, read_globs(options.left_out))


if __name__ == "__main__":
    main()
