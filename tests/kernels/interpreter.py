"""Makes Triton's interpreter run the step kernels on CPU tensors.

The interpreter is chosen when triton is imported (TRITON_INTERPRET=1), so it needs a
process of its own. It is also wrong for bfloat16, which NumPy does not know, in triton
3.6 and 3.9: it keeps the bits as uint16, tl.dot multiplies these bit patterns as if
they were numbers, and the cast from float32 cuts bits off instead of rounding to
nearest even. `install` replaces both.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np


def launched(name: str, args: tuple[Any, ...], more: dict[str, Any]) -> Any:
    """The result of a function of launch, or of bias_gradient; in such a process."""
    install()

    from cpcompile.kernels import bias_gradient, launch  # all import triton

    return getattr(bias_gradient if name == "dbias" else launch, name)(*args, **more)


@functools.cache
def install() -> None:
    """Make this process interpret kernels, and bfloat16 mean bfloat16."""
    os.environ["TRITON_INTERPRET"] = "1"

    import triton.language as tl
    from triton.runtime import interpreter

    assert isinstance(tl.cdiv, interpreter.InterpretedFunction), (
        "triton was imported before TRITON_INTERPRET was set"
    )
    builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    stock_cast, stock_dot = builder.cast_impl, builder.create_dot

    def cast(self: Any, x: Any, to: Any) -> Any:
        match x.dtype.scalar, to.scalar:
            case tl.bfloat16, tl.float32:
                return Handle(_float32_of_bits(x.data), tl.float32)
            case tl.float32, tl.bfloat16:
                return Handle(_bits_of_float32(x.data), tl.bfloat16)
        return stock_cast(self, x, to)

    def dot(self: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        if acc.dtype.scalar != tl.float32:
            return stock_dot(self, a, b, acc, *options)
        a, b = cast(self, a, tl.float32), cast(self, b, tl.float32)
        return Handle(np.matmul(a.data, b.data) + acc.data, tl.float32)

    builder.cast_impl, builder.create_dot = cast, dot


def _float32_of_bits(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """bfloat16 is the upper half of float32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def _bits_of_float32(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rounds to nearest, ties to even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)
