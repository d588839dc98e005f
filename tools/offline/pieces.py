"""Pack a folder into pieces of bounded size, and unpack them, with Python alone.

    pieces.py pack FOLDER PIECES [--mib 54] [--preset 1]     writes PIECES/p00, p01, .., index.json
    pieces.py unpack FOLDER PIECE ...                         writes the files that they hold

Each piece unpacks by itself, in any order and on all cores. Files are cut and joined into blocks of
24 MiB, each compressed for itself (xz, with its filter for machine code). A piece is a line of JSON
that lists its blocks, and the blocks. Zeros become holes of the unpacked files.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BLOCK = 24 << 20
MIB = 1 << 20
CHUNK = MIB  # written at once, or left as a hole
HEAD = MIB  # room for a piece's line of JSON


class IncompletePiece(Exception):
    """A piece whose content is not what was packed."""


@dataclass(frozen=True)
class BundlePart:
    """A range of bytes of one file."""

    path: str
    mode: int
    file_size: int
    offset: int
    length: int


def is_code(path: Path) -> bool:
    return ".so" in path.name or path.parent.name == "bin"


def plan_blocks(folder: Path) -> list[list[BundlePart]]:
    """Parts of every file by block, in the order of paths, machine code apart from the rest."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    blocks: list[list[BundlePart]] = []
    for code in (True, False):
        room = 0
        parts = [part for path in files if is_code(path) == code for part in cut(folder, path)]
        for part in parts:
            if part.length > room or not blocks:
                blocks.append([])
                room = BLOCK
            blocks[-1].append(part)
            room -= part.length
    return blocks


def cut(folder: Path, path: Path) -> Iterator[BundlePart]:
    """Parts of a file, of a block at most; one of an empty file."""
    status = path.stat()
    size = status.st_size
    name = str(path.relative_to(folder))
    for offset in range(0, max(1, size), BLOCK):
        yield BundlePart(
            name,
            status.st_mode & 0o777,
            size,
            offset,
            min(BLOCK, size - offset),
        )


def compress(folder: Path, block: list[BundlePart], preset: int, target: Path) -> dict[str, Any]:
    """Write a block and return its entry in a piece's first line."""
    content = bytearray()
    for part in block:
        with open(folder / part.path, "rb") as file:
            file.seek(part.offset)
            content += file.read(part.length)
    filters: list[dict[str, int]] = []
    if is_code(Path(block[0].path)):
        filters.append({"id": lzma.FILTER_X86})
    filters.append({"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": BLOCK})
    packed = lzma.compress(content, lzma.FORMAT_XZ, lzma.CHECK_CRC64, filters=filters)
    target.write_bytes(packed)
    files = [asdict(part) for part in block]
    return {"files": files, "size": len(packed), "crc": zlib.crc32(content)}


def distribute(sizes: list[int], limit: int) -> list[list[int]]:
    """Block numbers of each piece: first fit, largest first."""
    pieces: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        fitting = [piece for piece, left in enumerate(room) if left >= sizes[number]]
        if not fitting:
            pieces.append([])
            room.append(limit)
            fitting = [len(room) - 1]
        pieces[fitting[0]].append(number)
        room[fitting[0]] -= sizes[number]
    return pieces


def pack(folder: Path, out: Path, mib: int, preset: int, jobs: int) -> None:
    began = time.time()
    out.mkdir(parents=True, exist_ok=True)
    blocks = plan_blocks(folder)
    files = [out / f"block_{number}" for number in range(len(blocks))]
    count = len(blocks)
    with ProcessPoolExecutor(jobs) as pool:
        entries = list(
            pool.map(
                compress,
                [folder] * count,
                blocks,
                [preset] * count,
                files,
            )
        )
    pieces = distribute([entry["size"] for entry in entries], mib * MIB - HEAD)
    sizes = []
    for number, chosen in enumerate(pieces):
        head = {
            "piece": number,
            "of": len(pieces),
            "blocks": [entries[one] for one in chosen],
        }
        with open(out / f"p{number:02d}", "wb") as file:
            file.write(json.dumps(head).encode() + b"\n")
            for one in chosen:
                file.write(files[one].read_bytes())
                files[one].unlink()
            sizes.append(file.tell())
    (out / "index.json").write_text(json.dumps({"pieces": len(pieces), "sizes": sizes}))
    spent = time.time() - began
    print(f"{len(pieces)} pieces, {sum(sizes) / MIB:.0f} MiB, packed in {spent:.0f} s")


def read_head(piece: Path) -> tuple[dict[str, Any], int]:
    """First line of a piece, and where its blocks begin."""
    with open(piece, "rb") as file:
        line = file.readline()
        try:
            return json.loads(line), file.tell()
        except ValueError:
            raise IncompletePiece(f"{piece}: not a piece, or cut in its first line") from None


def expand(folder: Path, piece: Path, begin: int, block: dict[str, Any]) -> int:
    """Write a block's parts of files and return their bytes."""
    with open(piece, "rb") as file:
        file.seek(begin)
        packed = file.read(block["size"])
    try:
        content = lzma.decompress(packed)
    except lzma.LZMAError as error:
        raise IncompletePiece(f"{piece}: incomplete ({error}); transfer it again") from None
    if zlib.crc32(content) != block["crc"]:
        raise IncompletePiece(f"{piece}: not what was packed; transfer it again")
    begin = 0
    for fields in block["files"]:
        part = BundlePart(**fields)
        write(
            folder / part.path,
            part,
            memoryview(content)[begin : begin + part.length],
        )
        begin += part.length
    return len(content)


def write(path: Path, part: BundlePart, content: memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_CREAT | os.O_RDWR, part.mode)
    try:
        os.ftruncate(handle, part.file_size)
        for begin in range(0, len(content), CHUNK):
            chunk = content[begin : begin + CHUNK]
            # zeros are there already, as a hole
            if chunk != os.pread(handle, len(chunk), part.offset + begin):
                os.pwrite(handle, chunk, part.offset + begin)
    finally:
        os.close(handle)


def unpack(folder: Path, pieces: list[Path], jobs: int) -> None:
    began = time.time()
    total = 0
    with ProcessPoolExecutor(jobs) as pool:
        waiting = []
        for piece in pieces:
            head, begin = read_head(piece)
            for block in head["blocks"]:
                waiting.append(pool.submit(expand, folder, piece, begin, block))
                begin += block["size"]
        for each in waiting:
            total += each.result()
    print(f"{len(waiting)} blocks, {total / MIB:.0f} MiB in {time.time() - began:.1f} s")


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("command", choices=("pack", "unpack"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("pieces", nargs="+", type=Path)
    parser.add_argument("--mib", type=int, default=54, help="size of a piece at most")
    parser.add_argument("--preset", type=int, default=1, help="of xz: 6 is slower and smaller")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    try:
        if options.command == "pack":
            pack(
                options.folder,
                options.pieces[0],
                options.mib,
                options.preset,
                options.jobs,
            )
        else:
            unpack(options.folder, options.pieces, options.jobs)
    except IncompletePiece as error:
        raise SystemExit(f"pieces: {error}") from None


if __name__ == "__main__":
    main()
