"""A Triton kernel, compiled in this process as a rank on a GPU does it: LLVM then has signal
handlers of its own.
"""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add_one(values, size: tl.constexpr):
    places = values + tl.arange(0, size)
    tl.store(places, tl.load(places) + 1)


def compile_here() -> None:
    triton.knobs.compilation.always_compile = True
    source = ASTSource(add_one, {"values": "*fp32", "size": "constexpr"}, constexprs={"size": 64})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
