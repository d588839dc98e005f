#!/usr/bin/env python3
"""Checkpoints from one form into another: Hugging Face, Megatron, INT8, FP8, NVFP4. Each conversion proves itself.

    python tools/convert.py inspect ANY                            what is this folder, and what can be done with it
    python tools/convert.py import HF_FOLDER CHECKPOINT            Hugging Face -> Megatron's torch_dist
    python tools/convert.py export RUN@120 HF_FOLDER               a run or checkpoint -> Hugging Face
    python tools/convert.py quantize HF_FOLDER OUT --format int8   what stock vLLM serves
    python tools/convert.py dequantize FP8_FOLDER HF_FOLDER        a released FP8 model -> one that can be trained
    python tools/convert.py verify A B --logprobs prompts.txt      the proof that two folders hold one model

What is written appears under its name when it is whole. What a kill or a full disk has ended goes on where it was
when the same command is given again; until then it is called .NAME.partial. Beside the weights, parity.json says what
they were made of, with which versions, and a digest of what was read back. Nothing here needs a GPU, and
nothing in a folder is ever unpickled or run. `COMMAND --help` says more.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ANY = "HF_FOLDER|CHECKPOINT|RUN[@STEP]"
LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}  # read when torch makes its first tensor
LARGE_BYTES = 4 << 20


class Interrupted(KeyboardInterrupt):
    pass


def tune_memory() -> None:
    """A large tensor has large pages, which are cleared in a quarter of the time, and goes back whole when it goes."""
    os.environ.update(LARGE_PAGES)
    largest_kept, most_arenas = -3, -8  # mallopt's numbers for them
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(largest_kept, LARGE_BYTES)  # else it follows what is freed
    mallopt(most_arenas, 1)  # what one thread has freed is for the other


def main(argv: Sequence[str] | None = None) -> int:
    given = _parse(argv)
    before = {number: signal.signal(number, _interrupt) for number in ENDINGS}
    try:
        return _done(given)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _done(given: argparse.Namespace) -> int:
    try:
        from megatron_rl.config import ConfigError

        try:
            return given.act(given)
        except (ConfigError, OSError, ValueError, KeyError) as error:
            print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
            status = 1
    except Interrupted as interrupted:
        print(f"error: interrupted by {interrupted}", file=sys.stderr)
        status = 128 + signal.Signals[str(interrupted)]
    if (target := getattr(given, "target", None)) is not None:
        from megatron_rl.workshop.conversion.work import partial_of

        if partial_of(target).exists():
            kept = (
                f"What is finished is kept in {partial_of(target)}: give the same command again to go on, or remove it"
            )
            print(f"{target} was not written. {kept}", file=sys.stderr)
    return status


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(signal.Signals(number).name)


def inspect(given: argparse.Namespace) -> int:
    from megatron_rl.runs.console import table
    from megatron_rl.workshop.conversion.inspection import inspect

    found = inspect(given.source, given.hf, given.checksum)
    print("\n".join(table(("", given.source), found.rows)))
    for problem in found.problems:
        print(f"problem: {problem}")
    print(f"next: {found.next}")
    return 1 if found.problems else 0


def import_(given: argparse.Namespace) -> int:
    from megatron_rl.workshop.conversion.imports import import_folder
    from megatron_rl.workshop.conversion.sources import find

    import_folder(find(given.source), given.target)
    print(f"wrote the checkpoint {given.target}")
    return 0


def export(given: argparse.Namespace) -> int:
    from megatron_rl.workshop.conversion.exports import export_folder
    from megatron_rl.workshop.conversion.sources import find

    export_folder(find(given.source, given.hf), given.target)
    print(f"wrote the Hugging Face folder {given.target}")
    return 0


def quantize(given: argparse.Namespace) -> int:
    from megatron_rl.workshop.conversion.quantized import quantize_as_asked
    from megatron_rl.workshop.conversion.sources import find

    asked = {name: getattr(given, name) for name in ("format", "smooth", "calibrate", "ignore")}
    quantize_as_asked(find(given.source, given.hf), given.target, **asked)
    print(f"wrote the quantized folder {given.target}")
    return 0


def dequantize(given: argparse.Namespace) -> int:
    from megatron_rl.workshop.conversion.dequantized import dequantize_folder
    from megatron_rl.workshop.conversion.sources import find

    dequantize_folder(find(given.source), given.target)
    print(f"wrote the Hugging Face folder {given.target}")
    return 0


def verify(given: argparse.Namespace) -> int:
    from megatron_rl.workshop.conversion.sources import find
    from megatron_rl.workshop.conversion.verification import verify

    sources = [find(name, given.hf) for name in (given.one, given.other)]
    found = verify(*sources, given.logprobs, given.bound)
    found.write(given.report, sources, logprobs=given.logprobs, bound=given.bound)
    print(found.text())
    print(f"the whole of it: {given.report}")
    return 0 if found.ok else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (act, told, arguments) in COMMANDS.items():
        said, _, example = told.partition("\n")
        one = commands.add_parser(
            name, help=said, description=said, epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        one.set_defaults(act=act)
        arguments(one)
    return parser.parse_args(argv)


def _source(one: argparse.ArgumentParser, metavar: str = ANY) -> None:
    one.add_argument("source", metavar=metavar)


def _hf(one: argparse.ArgumentParser) -> None:
    one.add_argument("--hf", type=Path, metavar="FOLDER", help="config.json and tokenizer of a checkpoint without them")


def _inspect_arguments(one: argparse.ArgumentParser) -> None:
    _source(one)
    one.add_argument("--checksum", action="store_true", help="of every tensor, whatever files they are in")
    _hf(one)


def _import_arguments(one: argparse.ArgumentParser) -> None:
    _source(one, "HF_FOLDER")
    one.add_argument("target", type=Path, metavar="CHECKPOINT")


def _export_arguments(one: argparse.ArgumentParser) -> None:
    _source(one)
    one.add_argument("target", type=Path, metavar="HF_FOLDER")
    _hf(one)


def _quantize_arguments(one: argparse.ArgumentParser) -> None:
    _source(one)
    one.add_argument("target", type=Path, metavar="FOLDER")
    one.add_argument(
        "--format", required=True,
        help="int8, fp8 (per output channel), fp8_block (128x128): compressed-tensors, the bytes that a sampler gets; "
        "as_sampler: what the sampler of RUN@STEP held; modelopt_fp8, modelopt_fp8_kv, modelopt_nvfp4: calibrated",
    )  # fmt: skip
    one.add_argument("--smooth", type=float, metavar="ALPHA", help="int8: move activations' outliers into the weights")
    one.add_argument("--calibrate", metavar="FILE|SET", help="texts to measure activations on: .txt, .jsonl, .parquet")
    one.add_argument(
        "--ignore", action="append", metavar="PATTERN", help="a layer to keep: its name, or re:...; repeatable"
    )
    _hf(one)


def _dequantize_arguments(one: argparse.ArgumentParser) -> None:
    _source(one, "QUANTIZED_FOLDER")
    one.add_argument("target", type=Path, metavar="HF_FOLDER")


def _verify_arguments(one: argparse.ArgumentParser) -> None:
    one.add_argument("one", metavar="A")
    one.add_argument("other", metavar="B")
    one.add_argument("--logprobs", metavar="PROMPTS", help="compare logprobs, too: .txt, .jsonl, .parquet, or a set")
    one.add_argument("--bound", type=float, default=0.0, help="relative error of a tensor that is let pass (0)")
    one.add_argument(
        "--report", type=Path, default=Path("parity.json"), help="where to write it (default: %(default)s)"
    )
    _hf(one)


TOOL = "python tools/convert.py"
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str, Callable[[argparse.ArgumentParser], None]]] = {
    "inspect": (inspect, f"what a folder or a run holds\n{TOOL} inspect runs/dapo", _inspect_arguments),
    "import": (
        import_,
        f"Hugging Face folder -> torch_dist checkpoint\n{TOOL} import models/Qwen3-8B checkpoints/qwen3-8b",
        _import_arguments,
    ),
    "export": (
        export,
        f"run or checkpoint -> Hugging Face folder\n{TOOL} export runs/dapo@120 exported/dapo-120",
        _export_arguments,
    ),
    "quantize": (
        quantize,
        f"plain weights -> a folder that stock vLLM serves\n{TOOL} quantize runs/dapo@120 out/int8 --format int8",
        _quantize_arguments,
    ),
    "dequantize": (
        dequantize,
        f"quantized folder -> plain BF16 folder\n{TOOL} dequantize models/DeepSeek-FP8 models/plain",
        _dequantize_arguments,
    ),
    "verify": (
        verify,
        f"compare two folders; exit status 1 where they differ\n{TOOL} verify runs/dapo@120 out/int8 --logprobs t.txt",
        _verify_arguments,
    ),
}


if __name__ == "__main__":
    tune_memory()
    sys.exit(main())
