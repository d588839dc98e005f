"""Matrix products on hosts that lack instructions: an abler host plays them, its products kept down
by a variable.
"""

import json

import pytest
from helpers import program

from megatron_rl.processes import instructions

LIMIT = "ONEDNN_MAX_CPU_ISA"
ABLE = "flags\t\t: fpu avx2 avx512f avx512_vnni avx512_bf16\n"


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    for name in instructions.LIMITS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Gives the host these flags and this limit."""
    monkeypatch.setattr(instructions, "CPU_FLAGS", tmp_path / "cpuinfo")

    def play(text: str | None, limit: str = "") -> None:
        if text is not None:
            instructions.CPU_FLAGS.write_text(text)
        monkeypatch.setenv(LIMIT, limit)

    return play


@pytest.mark.parametrize(
    ("text", "limit", "lacking"),
    [
        (ABLE, "", {}),
        (ABLE, "ALL", {}),
        (ABLE, "avx512_core_vnni", {"bf16": f"{LIMIT}=avx512_core_vnni"}),
        (ABLE, "AVX2", {"bf16": f"{LIMIT}=AVX2", "int8": f"{LIMIT}=AVX2"}),
        ("flags : fpu amx_tile\n", "", {}),
        ("flags : avx512f avx512_vnni\n", "", {"bf16": "no avx512_bf16 or amx_tile"}),
        (
            "flags : avx2\n",
            "AVX2",
            {"bf16": "no avx512_bf16 or amx_tile", "int8": "no avx512_vnni or amx_tile"},
        ),
        ("Features : asimd\n", "", {}),  # not known to be slow
        (None, "AVX2", {}),
    ],
)
def test_what_a_host_lacks_has_its_reason(text, limit, lacking, host):
    host(text, limit)
    assert instructions.lacking() == lacking
    assert ("learner.precision" in instructions.fastest()) == ("bf16" in lacking)


PRODUCTS = """
import json, torch
from megatron_rl.quantization import cpu_matmul
from megatron_rl.tracking.status import environment
cpu_matmul.install()
codes = torch.full((16, 256), 127, dtype=torch.int8)
weight = cpu_matmul.Int8Weight(codes, torch.ones(16, 1))
left, right = torch.randn(40, 256).bfloat16(), torch.randn(256, 24).bfloat16()
exact, made = left.double() @ right.double(), (left @ right).double()
print(json.dumps({
    "bf16": cpu_matmul.has_bf16(), "int8": cpu_matmul.has_int8(),
    "sums": sorted(set(weight.sums(codes).flatten().tolist())),
    "rounded_once": bool(((made - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()),
    "said": environment()["host"],
}))
"""


@pytest.mark.parametrize("limit", ["", "AVX2", "AVX512_CORE"])
def test_products_are_exact_on_a_host_that_is_kept_from_its_instructions(limit, monkeypatch):
    if limit:
        monkeypatch.setenv(LIMIT, limit)
    found = json.loads(program(PRODUCTS))
    assert found["sums"] == [127 * 127 * 256]
    assert found["rounded_once"]
    lacking = instructions.lacking()
    for kind in instructions.NEEDS:
        by = f"in FP32: {lacking[kind]}" if kind in lacking else "by instructions"
        assert found["said"]["products"][kind] == by
        assert found[kind] == (kind not in lacking)
    assert found["said"]["quickstart"] == instructions.fastest()
