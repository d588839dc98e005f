#!/usr/bin/env python3
"""Converter of checkpoints: Hugging Face, Megatron, INT8, FP8, NVFP4. Each conversion proves itself.

    inspect ANY                            kind, model, precision, and the next command
    import HF_FOLDER CHECKPOINT            Hugging Face -> Megatron's torch_dist
    export RUN@120 HF_FOLDER               a run or checkpoint -> Hugging Face
    adapters RUN@120 PEFT_FOLDER           a run of learner.lora -> PEFT's folder
    quantize HF_FOLDER OUT --format int8   what stock vLLM serves
    dequantize FP8_FOLDER HF_FOLDER        a released FP8 model -> one that can be trained
    verify A B                             two folders compared, tensor by tensor

A folder is called .NAME.partial until it is complete; a conversion that was stopped begins anew.
Beside the weights, parity.json is its certificate: the inputs, the versions, and a digest of what
was read back. Nothing here needs a GPU, and nothing in a folder is ever run. `COMMAND --help` says
more.
"""

from __future__ import annotations

from megatron_rl.processes.interrupts import leaving_at_once

with leaving_at_once():
    import argparse
    import ctypes
    import signal
    import sys
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import FrameType
    from typing import Any

    from megatron_rl.processes.process import run_script

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def tune_memory() -> None:
    """Give a large tensor's memory back when it goes: M_MMAP_THRESHOLD grows otherwise."""
    ctypes.CDLL(None).mallopt(-3, 4 << 20)


class Interrupted(KeyboardInterrupt):
    pass


def main(argv: Sequence[str] | None = None) -> int:
    given = _parse(argv)
    before = {number: signal.signal(number, _interrupt) for number in ENDINGS}
    try:
        from megatron_rl.config import ConfigError

        return given.act(given)
    except Interrupted as interrupted:
        print(f"error: interrupted by {interrupted}; begin again", file=sys.stderr)
        return 128 + signal.Signals[str(interrupted)]
    except (ConfigError, OSError, ValueError, KeyError) as error:
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(signal.Signals(number).name)


def inspect(given: argparse.Namespace) -> int:
    from megatron_rl.apps.conversion.inspection import inspect
    from megatron_rl.tracking.console import table

    found = inspect(given.source, given.hf)
    print("\n".join(table(("", given.source), found.rows)))
    for problem in found.problems:
        print(f"problem: {problem}")
    print(f"next: {found.next}")
    return 1 if found.problems else 0


def import_(given: argparse.Namespace) -> int:
    from megatron_rl.apps.conversion.imports import import_folder
    from megatron_rl.apps.conversion.sources import find

    import_folder(find(given.source), given.target)
    print(f"wrote the checkpoint {given.target}")
    return 0


def export(given: argparse.Namespace) -> int:
    from megatron_rl.apps.conversion.exports import export_folder
    from megatron_rl.apps.conversion.sources import find

    export_folder(find(given.source, given.hf), given.target)
    print(f"wrote the Hugging Face folder {given.target}")
    return 0


def adapters(given: argparse.Namespace) -> int:
    from megatron_rl.apps.conversion.sources import find
    from megatron_rl.apps.evaluation.adapters import is_peft, write_peft

    source = find(given.source, given.hf)
    held = source.adapters
    if held is None or source.lora is None or is_peft(source.path):
        kind = "a whole model" if held is None else "PEFT's adapters"
        raise ValueError(f"{source.path} holds {kind}; name a checkpoint of learner.lora: RUN@STEP")
    if given.target.exists():
        raise ValueError(f"{given.target} is there already: remove it, or name another one")
    write_peft(held, source.lora, source.folder, given.target)
    print(f"wrote PEFT's folder {given.target}")
    return 0


def quantize(given: argparse.Namespace) -> int:
    from megatron_rl.apps.conversion.quantized import quantize_folder
    from megatron_rl.apps.conversion.sources import find

    quantize_folder(
        find(given.source, given.hf),
        given.target,
        format=given.format,
        calibrate=given.calibrate,
        ignore=given.ignore,
    )
    print(f"wrote the quantized folder {given.target}")
    return 0


def dequantize(given: argparse.Namespace) -> int:
    from megatron_rl.apps.conversion.dequantized import dequantize_folder
    from megatron_rl.apps.conversion.sources import find

    dequantize_folder(find(given.source), given.target)
    print(f"wrote the Hugging Face folder {given.target}")
    return 0


def verify(given: argparse.Namespace) -> int:
    from megatron_rl.apps.conversion.sources import find
    from megatron_rl.apps.conversion.verification import Verified, compare
    from megatron_rl.files import refuse_special

    refuse_special(given.report)
    sources = [find(name, given.hf) for name in (given.one, given.other)]
    found = Verified(list(compare(*sources, given.bound)))
    print(found.text())
    found.write(given.report, sources, given.bound)
    print(f"report: {given.report}")
    return 0 if found.ok else 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (act, said, example, arguments) in COMMANDS.items():
        epilog = f"example: python tools/convert.py {name} {example}"
        one = commands.add_parser(
            name, help=said, description=said, epilog=epilog, formatter_class=form
        )
        one.set_defaults(act=act)
        for argument, about in arguments.items():
            one.add_argument(argument, **about)
    return parser.parse_args(argv)


Arguments = dict[str, dict[str, Any]]
SOURCE: Arguments = {"source": {"metavar": "HF_FOLDER|CHECKPOINT|RUN[@STEP]|ORG/NAME"}}
HF: Arguments = {
    "--hf": {
        "type": Path,
        "metavar": "FOLDER",
        "help": "config.json and tokenizer of a checkpoint without them",
    }
}
QUANTIZE: Arguments = {
    "--format": {
        "required": True,
        "choices": (
            "int8",
            "fp8",
            "fp8_block",
            "as_sampler",
            "modelopt_fp8",
            "modelopt_fp8_kv",
            "modelopt_nvfp4",
        ),
        "help": "int8, fp8 (per output channel), fp8_block (128x128): the bytes that a sampler "
        "gets; as_sampler: what the sampler of RUN@STEP held; modelopt_*: calibrated",
    },
    "--calibrate": {
        "metavar": "FILE|SET",
        "help": "texts for modelopt to measure activations on: .txt, .jsonl, .parquet",
    },
    "--ignore": {
        "action": "append",
        "metavar": "PATTERN",
        "help": "a layer to keep: its name, or re:...; repeatable",
    },
}
VERIFY: Arguments = {
    "one": {"metavar": "A"},
    "other": {"metavar": "B"},
    "--bound": {
        "type": float,
        "default": 0.0,
        "help": "relative error of a tensor that is let pass (0)",
    },
    "--report": {
        "type": Path,
        "default": Path("parity.json"),
        "help": "where to write it (default: %(default)s)",
    },
}


def _target(metavar: str) -> Arguments:
    return {"target": {"type": Path, "metavar": metavar}}


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], int], str, str, Arguments]] = {
    "inspect": (inspect, "what a folder or a run holds", "runs/dapo", SOURCE | HF),
    "import": (
        import_,
        "Hugging Face folder -> torch_dist checkpoint",
        "Qwen/Qwen3-8B checkpoints/qwen3-8b",
        {"source": {"metavar": "HF_FOLDER|ORG/NAME"}} | _target("CHECKPOINT"),
    ),
    "export": (
        export,
        "run or checkpoint -> Hugging Face folder",
        "runs/dapo@120 exported/dapo-120",
        SOURCE | _target("HF_FOLDER") | HF,
    ),
    "adapters": (
        adapters,
        "checkpoint of adapters (learner.lora) -> PEFT's folder",
        "runs/lora@120 exported/adapters",
        SOURCE | _target("PEFT_FOLDER") | HF,
    ),
    "quantize": (
        quantize,
        "plain weights -> a folder that stock vLLM serves",
        "runs/dapo@120 out/int8 --format int8",
        SOURCE | _target("FOLDER") | QUANTIZE | HF,
    ),
    "dequantize": (
        dequantize,
        "quantized folder -> plain BF16 folder",
        "models/DeepSeek-FP8 models/plain",
        {"source": {"metavar": "QUANTIZED_FOLDER"}} | _target("HF_FOLDER"),
    ),
    "verify": (
        verify,
        "compare two folders; exit status 1 where they differ",
        "runs/dapo@120 out/int8",
        VERIFY | HF,
    ),
}


if __name__ == "__main__":
    tune_memory()
    run_script(main)
