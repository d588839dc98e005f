"""GPU time of a torch.profiler trace by kind of kernel, and when the GPU was idle.

    trace_summary.py TRACE.json[.gz] ...

Traces come from log.profile_steps or update.py. A kernel's kind is known by its name; small kernels
over logits by the shape of the operator that launched them: at least a million elements of which
the last dimension is no width of the model.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = (
    ("attention", r"fmha|flash|sdpa|cudnn.*(attn|attention)|fused_attn|softmax_warp"),
    ("product", r"gemm|nvjet|cutlass|xmma|cublas|wgmma|s16816|splitKreduce"),
    ("rope", r"rope|rotary"),
    ("norm", r"rmsnorm|layernorm|ln_(fwd|bwd)|norm_kernel|normalization"),
    ("compiled", r"^triton_"),
    ("optimizer", r"multi_tensor|adam|l2norm"),
    ("FP8 cast", r"cast|quantize|transpose|amax"),
    ("embedding", r"embedding|indexing_backward|index_select|indexSelect"),
    ("nccl", r"nccl"),
    ("copy, fill", r"memcpy|memset|copy|fill|FillFunctor"),
    ("reduce", r"reduce"),
    ("elementwise", r"elementwise|vectorized|unrolled|scatter|gather|CatArray"),
)
LOGITS = "logits"
MAYBE_LOGITS = ("copy, fill", "reduce", "elementwise", "other")
LEAST_COLUMNS = 1024
LEAST_ELEMENTS = 1 << 20
WIDTHS = (1024, 2048, 3072, 4096, 6144)
WAITING = "Synchronize|cudaMalloc|cudaFree|MemMap|MemCreate|MemcpyAsync$"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
SHORT_US = 20.0
NAMES = 5
GAPS = 12


@dataclass
class Total:
    us: float = 0.0
    count: int = 0

    def add(self, us: float) -> None:
        self.us += us
        self.count += 1


@dataclass
class EventKind:
    total: Total = field(default_factory=Total)
    by_name: dict[str, Total] = field(default_factory=lambda: defaultdict(Total))


@dataclass(frozen=True)
class Gap:
    us: float
    at_us: float
    before: str  # operator of the kernel that ended it


def read_events(path: Path) -> list[dict[str, Any]]:
    packed = path.read_bytes()
    text = gzip.decompress(packed) if path.suffix == ".gz" else packed
    return json.loads(text)["traceEvents"]


def has_logits(shapes: Iterable[Any]) -> bool:
    for shape in shapes:
        if not isinstance(shape, list) or [type(size) for size in shape] != [int, int]:
            continue
        rows, columns = shape
        if columns >= LEAST_COLUMNS and rows * columns >= LEAST_ELEMENTS and columns not in WIDTHS:
            return True
    return False


def kind_of(name: str, shapes: Iterable[Any]) -> str:
    matching = (kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))
    kind = next(matching, "other")
    if kind in MAYBE_LOGITS and has_logits(shapes):
        return LOGITS
    return kind


def ms(us: float) -> str:
    return f"{us / 1e3:.1f} ms"


def by_time(totals: Iterable[tuple[str, Total]]) -> list[tuple[str, Total]]:
    return sorted(totals, key=lambda item: -item[1].us)


def gpu_lines(path: Path, events: list[dict[str, Any]]) -> list[str]:
    operators = {}
    for event in events:
        arguments = event.get("args", {})
        if event.get("cat") == "cpu_op" and "Input Dims" in arguments:
            operators[arguments.get("External id")] = (event["name"], arguments["Input Dims"])
    kernels = [event for event in events if event.get("cat") in ON_GPU]
    kernels.sort(key=lambda event: event["ts"])
    if not kernels:
        return [f"{path.name}: no kernel in it"]
    kinds: dict[str, EventKind] = defaultdict(EventKind)
    gaps = []
    begin = kernels[0]["ts"]
    end = begin
    busy = 0.0
    for event in kernels:
        operator, shapes = operators.get(event.get("args", {}).get("External id"), ("", []))
        kind = kinds[kind_of(event["name"], shapes)]
        kind.total.add(event["dur"])
        name = re.sub(r"<.*", "", event["name"])[:60] + (f" [{operator}]" if operator else "")
        kind.by_name[name].add(event["dur"])
        if event["ts"] > end:
            gaps.append(Gap(event["ts"] - end, end - begin, operator or "a kernel of no operator"))
        stop = event["ts"] + event["dur"]
        busy += max(0.0, stop - max(event["ts"], end))
        end = max(end, stop)

    span = end - begin
    lines = [f"{path.name}: {ms(span)} from first to last kernel, {len(kernels)} kernels"]
    lines.append(f"busy {ms(busy)} ({busy / span:.0%})")
    for name, total in by_time((name, kind.total) for name, kind in kinds.items()):
        each = total.us / total.count
        share = total.us / span
        lines.append(f"{name:<12} {ms(total.us):>12} {share:6.1%} {total.count:7d} x {each:.1f} us")
        for kernel, part in by_time(kinds[name].by_name.items())[:NAMES]:
            lines.append(f"  {ms(part.us):>12} {part.count:6d} x {kernel}")
    idle = sum(gap.us for gap in gaps)
    short = sum(gap.us for gap in gaps if gap.us < SHORT_US)
    lines.append(f"idle {ms(idle)} in {len(gaps)} gaps, {ms(short)} in those under {SHORT_US} us")
    for gap in sorted(gaps, key=lambda gap: -gap.us)[:GAPS]:
        lines.append(f"  {ms(gap.us):>12} at {ms(gap.at_us)}, before {gap.before}")
    return lines


def cpu_lines(events: list[dict[str, Any]]) -> list[str]:
    """Driver calls that wait, and the most frequent operators."""
    waits: dict[str, Total] = defaultdict(Total)
    operators: dict[str, Total] = defaultdict(Total)
    for event in events:
        if event.get("cat") == "cuda_runtime" and re.search(WAITING, event["name"]):
            waits[event["name"]].add(event["dur"])
        elif event.get("cat") == "cpu_op":
            operators[event["name"]].add(event.get("dur", 0.0))
    calls = by_time(waits.items())
    lines = [f"CPU: {ms(total.us)} in {total.count} x {name}" for name, total in calls]
    frequent = sorted(operators.items(), key=lambda item: -item[1].count)[:GAPS]
    count = sum(total.count for total in operators.values())
    most = ", ".join(f"{name} {total.count}" for name, total in frequent)
    return [*lines, f"operators: {count}; {most}"]


def summarize(path: Path) -> str:
    events = read_events(path)
    return "\n".join(gpu_lines(path, events) + cpu_lines(events)) + "\n"


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    for trace in parser.parse_args().traces:
        print(summarize(trace))


if __name__ == "__main__":
    main()
