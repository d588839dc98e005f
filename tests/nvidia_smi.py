"""Mocked nvidia-smi of a mocked node."""

import sys
from pathlib import Path

H100 = "NVIDIA H100 80GB HBM3"
SCRIPT = """#!{python} -S
import sys
rows = {rows!r}
query = next(word for word in sys.argv if word.startswith("--query-gpu="))
for row in rows:
    print(*(row[field] for field in query.partition("=")[2].split(",")), sep=", ")
sys.exit(0 if rows else 9)
"""


def nvidia_smi(folder: Path, gpus: int, driver: str = "580.95.05", used: int = 561) -> None:
    """Written to `folder`. The last GPU has so many MiB in use, the others none to speak of."""
    row = {
        "name": H100,
        "compute_cap": "9.0",
        "memory.total": "81559",
        "memory.used": "561",
        "driver_version": driver,
    }
    rows = [row] * (gpus - 1) + [row | {"memory.used": str(used)}] * (gpus > 0)
    tool = folder / "nvidia-smi"
    tool.write_text(SCRIPT.format(python=sys.executable, rows=rows))
    tool.chmod(0o755)
