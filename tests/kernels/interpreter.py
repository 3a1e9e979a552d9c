"""Runs the step kernels on CPU tensors, in a process with Triton's interpreter.

The interpreter is chosen when triton is imported (TRITON_INTERPRET=1), so it needs a
process of its own. It is also wrong for bfloat16, which NumPy does not know, in triton
3.6 and 3.9: it keeps the bits as uint16, tl.dot multiplies these bit patterns as if
they were numbers, and the cast from float32 cuts bits off instead of rounding to
nearest even. `install` replaces both.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

START_TIMEOUT_SECONDS = 60.0


class Interpreter:
    """A process that calls what launches kernels, one call at a time.

    Started by the first call. A call that outlasts its timeout ends the process, and
    the next call gets a fresh one.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Connection | None = None

    def call(self, name: str, *args: Any, timeout: float = 60.0, **kwargs: Any) -> Any:
        """The result of a function of launch, or of bias_gradient; all is pickled."""
        if self._connection is None:
            self._start()
        assert self._connection is not None
        self._connection.send_bytes(pickle.dumps((name, args, kwargs)))
        return self._answer(name, timeout)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._connection is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = self._connection = None

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._answer("start of the interpreter", START_TIMEOUT_SECONDS)

    def _answer(self, what: str, timeout: float) -> Any:
        assert self._connection is not None
        try:
            if not self._connection.poll(timeout):
                raise AssertionError(f"{what}: no answer after {timeout:g} s")
            done, value = pickle.loads(self._connection.recv_bytes())
        except BaseException:
            self.close()
            raise
        if not done:
            raise AssertionError(f"{what} failed:\n{value}")
        return value


def serve(connection: Connection) -> None:
    """The main function of the process: answer until the parent is gone."""
    install()

    import torch

    from cpcompile.kernels import bias_gradient, launch  # all import triton

    torch.set_num_threads(1)
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            name, args, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            module = bias_gradient if name == "dbias" else launch
            reply = pickle.dumps((True, getattr(module, name)(*args, **kwargs)))
        except BaseException:
            reply = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(reply)


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
