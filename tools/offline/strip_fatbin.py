"""Zero the parts of shared objects that a GPU of one architecture never reads.

    strip_fatbin.py [--arch 90] [--drop NAME ...] [--jobs N] FILE_OR_FOLDER ...

Zeroed are GPU code of other architectures, and symbols and lines for debuggers (.symtab, .strtab,
.debug_*). Kept is machine code of --arch, its `a` variant with it; where a fat binary has none, the
highest PTX that a driver can compile for it. Sizes, offsets and headers stay, so that a file is as
valid as before, and zeros compress to nothing.

A fat binary is a header (magic 0xBA55ED50, version 1, 16 bytes, size) and entries: kind (1 PTX,
2 ELF), sizes of the entry's header and code, architecture. A new file is written, compared with the
old one, and takes its place: hard links to a package cache stay as they are.
"""

from __future__ import annotations

import argparse
import mmap
import os
import struct
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
ENTRY_VERSION = 0x101
ENTRY_HEADER = 64
PTX = 1
ELF = 2
VARIANT_A = 1 << 20  # code for this very architecture: sm_90a
ELF_MAGIC = b"\x7fELF"
SMALLEST = 4096  # bytes: smaller files have nothing worth zeroing
SECTION_HEADER = 64
ALLOCATED = 2  # flag of sections that are loaded
NO_BITS = 8  # type of sections without bytes in the file
SYMBOLS = (b".symtab", b".strtab")

Range = tuple[int, int]  # begin and length in a file


class BrokenFile(Exception):
    """A shared object that is cut or inconsistent."""


@dataclass(frozen=True)
class FatbinEntry:
    kind: int
    arch: int
    flags: int
    begin: int  # of the code, in the file
    size: int


@dataclass(frozen=True)
class Bytes:
    kept: int = 0  # GPU code
    dropped: int = 0
    symbols: int = 0


def fat_binaries(data: mmap.mmap) -> list[list[FatbinEntry]]:
    """Entries of each fat binary whose walk ends exactly at its end."""
    found = []
    position = data.find(MAGIC)
    while position >= 0:
        (size,) = struct.unpack_from("<Q", data, position + 8)
        end = position + 16 + size
        entries = walk(data, position + 16, end) if end <= len(data) else []
        if entries:
            found.append(entries)
            position = end
        else:
            position += 4
        position = data.find(MAGIC, position)
    return found


def walk(data: mmap.mmap, position: int, end: int) -> list[FatbinEntry]:
    """Entries between two positions; none where they do not fill the space."""
    entries = []
    while position < end:
        if position + ENTRY_HEADER > end:
            return []
        kind, version, header = struct.unpack_from("<HHI", data, position)
        (size,) = struct.unpack_from("<Q", data, position + 8)
        (arch,) = struct.unpack_from("<I", data, position + 28)
        (flags,) = struct.unpack_from("<Q", data, position + 40)
        begin = position + header
        if version != ENTRY_VERSION or header < ENTRY_HEADER or begin + size > end:
            return []
        if not 20 <= arch <= 200:
            return []
        entries.append(FatbinEntry(kind, arch, flags, begin, size))
        position = begin + size
    return entries


def wanted(entries: list[FatbinEntry], arch: int) -> list[FatbinEntry]:
    """Entries that a GPU of this architecture would use; none for architecture 0."""
    code = [entry for entry in entries if entry.kind == ELF and entry.arch == arch]
    if code or not arch:
        return code
    older = [entry for entry in entries if entry.arch < arch and not entry.flags & VARIANT_A]
    same = [entry for entry in entries if entry.arch == arch]
    texts = [entry for entry in older + same if entry.kind == PTX]
    return sorted(texts, key=lambda entry: (entry.arch, entry.begin))[-1:]


def unwanted(binaries: list[list[FatbinEntry]], arch: int) -> set[FatbinEntry]:
    found = set()
    for entries in binaries:
        found |= set(entries) - set(wanted(entries, arch))
    return found


def debug_sections(path: Path, data: mmap.mmap) -> list[Range]:
    """Ranges of an ELF file's symbols and debug sections."""
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    if not table:
        return []
    if size != SECTION_HEADER or table + size * count > len(data) or names >= count:
        raise BrokenFile(f"{path}: section headers beyond its end; install it again")
    headers = [
        struct.unpack_from(
            "<IIQQQQ",
            data,
            table + n * size,
        )
        for n in range(count)
    ]
    names_at = headers[names][4]
    found = []
    for number, (name, kind, flags, _, begin, length) in enumerate(headers):
        if flags & ALLOCATED or kind == NO_BITS or number == names:
            continue
        text = bytes(data[names_at + name : data.find(b"\0", names_at + name)])
        if text in SYMBOLS or text.startswith(b".debug_"):
            if begin + length > len(data):
                raise BrokenFile(f"{path}: section {text.decode()} lies beyond its end")
            found.append((begin, length))
    return found


def strip(path: Path, arch: int) -> Bytes:
    """Zero what is unwanted in one file."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size < SMALLEST or file.read(4) != ELF_MAGIC:
            return Bytes()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            binaries = fat_binaries(data)
            dropped = unwanted(binaries, arch)
            symbols = debug_sections(path, data)
            zeros = sorted([(entry.begin, entry.size) for entry in dropped] + symbols)
            if zeros:
                write(path, data, zeros, binaries)
    code = sum(entry.size for entries in binaries for entry in entries)
    gone = sum(entry.size for entry in dropped)
    return Bytes(code - gone, gone, sum(length for _, length in symbols))


def write(
    path: Path, data: mmap.mmap, zeros: list[Range], binaries: list[list[FatbinEntry]]
) -> None:
    new = path.with_name(f"{path.name}.stripped")
    with open(new, "wb") as target:
        for begin, end in kept_ranges(zeros, len(data)):
            target.seek(begin)
            target.write(data[begin:end])
        target.truncate(len(data))
    os.chmod(new, os.stat(path).st_mode)
    check(path, new, data, zeros, binaries)
    os.replace(new, path)


def kept_ranges(zeros: list[Range], size: int) -> list[Range]:
    """Begin and end of what lies between the zeros, in parts of 16 MiB at most."""
    found = []
    position = 0
    for begin, length in [*zeros, (size, 0)]:
        for start in range(position, begin, 1 << 24):
            found.append((start, min(begin, start + (1 << 24))))
        position = max(position, begin + length)
    return found


def check(
    path: Path,
    new: Path,
    before: mmap.mmap,
    zeros: list[Range],
    binaries: list[list[FatbinEntry]],
) -> None:
    """Compare what was written with the original: the same entries, nothing else changed."""
    with (
        open(new, "rb") as file,
        mmap.mmap(
            file.fileno(),
            0,
            access=mmap.ACCESS_READ,
        ) as after,
    ):
        if len(before) != len(after) or fat_binaries(after) != binaries:
            raise BrokenFile(f"{path}: its fat binaries could not be kept as they were")
        for begin, end in kept_ranges(zeros, len(before)):
            if before[begin:end] != after[begin:end]:
                raise BrokenFile(f"{path}: bytes from {begin} to {end} were not to change")


def shared_objects(paths: list[Path]) -> list[Path]:
    """Files given and files in folders given, largest first."""
    found = []
    for path in paths:
        inside = path.rglob("*.so*") if path.is_dir() else [path]
        found += [each for each in inside if each.is_file() and not each.is_symlink()]
    return sorted(found, key=lambda path: -path.stat().st_size)


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="compute capability, such as 90")
    help_drop = "a file by name, all of whose GPU code is zeroed"
    parser.add_argument("--drop", action="append", default=[], metavar="NAME", help=help_drop)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    files = shared_objects(options.paths)
    archs = [0 if path.name in options.drop else options.arch for path in files]
    with ProcessPoolExecutor(options.jobs) as pool:
        try:
            found = list(pool.map(strip, files, archs))
        except BrokenFile as error:
            raise SystemExit(f"strip_fatbin: {error}") from None
    kept = sum(each.kept for each in found) / 1e6
    dropped = sum(each.dropped for each in found) / 1e6
    symbols = sum(each.symbols for each in found) / 1e6
    print(f"GPU code: {kept:.0f} MB kept, {dropped:.0f} zeroed; symbols: {symbols:.0f} MB zeroed")


if __name__ == "__main__":
    main()
