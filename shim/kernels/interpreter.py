"""Corrects bf16 products of Triton's interpreter: it keeps bf16 as uint16 and multiplies the bit patterns as integers.

Seen in Triton 3.6 and 3.9, in `tl.dot` and `*`. On a GPU nothing is changed.
"""

from __future__ import annotations

from typing import Any


def mend() -> None:
    """Changes the interpreter once, if kernels run in it. Every launch.py of kernels that take bf16 calls this."""
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
