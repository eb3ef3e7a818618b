"""Makes Triton's interpreter right about bf16, which it keeps as uint16: it multiplies the bit patterns as integers.

Seen in Triton 3.6 and 3.9, in `tl.dot` and `*`. On a GPU nothing is changed.
"""

from __future__ import annotations

from typing import Any


def mend() -> None:
    """Does it once, and only where kernels run in the interpreter. Every launch.py whose kernels take bf16 calls it."""
    import triton

    if not triton.knobs.runtime.interpret:
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder, "_glm5_shim_bf16", False):
        return
    builder._glm5_shim_bf16 = True
    dot, multiply = builder.create_dot, builder.create_fmul

    def widen(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), *rest)

    def create_fmul(self: Any, a: Any, b: Any) -> Any:
        product = multiply(self, widen(a), widen(b))
        return product if a.dtype.scalar != tl.bfloat16 else self.cast_impl(product, tl.bfloat16)

    builder.create_dot, builder.create_fmul = create_dot, create_fmul
