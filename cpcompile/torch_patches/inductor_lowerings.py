"""Fix what Inductor does to calls of a graph (torch 2.13 to 2.15).

- It takes the number of ranks of an all-gather for an operand, with which booleans are
  promoted to int64: eight times the bytes, and later calls on the result, which expect
  booleans, fail in code generation.
- It asks the backward of a convolution for the order of strides by their values, which
  fixes every size that is a symbol. Such a backward is the call of aten, as it is
  without an autotuner's templates.
- It writes into operands of functions in the backward. Inputs that may be overwritten,
  because the forward saved them and nobody reads them again, it knows by their numbers,
  and takes the same numbers for operands of a function that the backward calls:

    backward(primals, x, total, ...)     # numbers 1 and 3 may be overwritten
    def block(x, w, bias, total):        # called for every layer
        return total + x @ w + bias      # written into total, which is its number 3

  The caller hands the memory of an operand to somebody else, while the result still
  lies in it.
- It holds all results of a function until the last one is read, of all tiles the
  gradients of logits. Each is let go as it is read.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


@functools.cache
def install() -> None:
    """Put the fixes in; called before Inductor compiles a graph."""
    lowerings = importlib.import_module("torch._inductor.lowering").lowerings
    call = torch.ops._c10d_functional.all_gather_into_tensor
    for op in (call, call.default):
        unpromoted = getattr(lowerings.get(op), "__wrapped__", None)
        if unpromoted is not None:
            lowerings[op] = _unpromoted(lowerings[op], unpromoted)
    convolutions = importlib.import_module("torch._inductor.kernel.conv")
    aten = getattr(convolutions, "aten_convolution_backward_fallback", None)
    op = torch.ops.aten.convolution_backward.default
    if aten is not None and op in lowerings:
        lowerings[op] = _of_any_size(lowerings[op], aten)
    _let_go()


def _unpromoted(promoting: Any, unpromoted: Any) -> Any:
    @functools.wraps(promoting)
    def all_gather(x: Any, *rest: Any) -> Any:
        lower = unpromoted if x.get_dtype() is torch.bool else promoting
        return lower(x, *rest)

    return all_gather


def _of_any_size(guarding: Any, aten: Any) -> Any:
    @functools.wraps(guarding)
    def convolution_backward(grad: Any, x: Any, *rest: Any, **named: Any) -> Any:
        numbers = all(isinstance(n, int) or n.is_number for n in grad.get_size())
        return (guarding if numbers else aten)(grad, x, *rest, **named)

    return convolution_backward


def _let_go() -> None:
    wrapper = importlib.import_module("torch._inductor.codegen.wrapper")
    code, called = wrapper.PythonWrapperCodegen, wrapper.ir.InvokeSubgraph
    read = code.codegen_multi_output

    @functools.wraps(read)
    def codegen_multi_output(self: Any, node: Any) -> None:
        read(self, node)
        source, graph = node.inputs[0], wrapper.V.graph
        if isinstance(source, called) and not (graph.cpp_wrapper or graph.fx_wrapper):
            name, ((_, i),) = source.get_name(), node.indices
            self.writeline(f"{name} = [*{name}[:{i}], None, *{name}[{i} + 1 :]]")

    code.codegen_multi_output = codegen_multi_output


@functools.cache
def keep_operands() -> None:
    """Put the fix in; called before Inductor compiles a graph."""
    lowering: Any = importlib.import_module("torch._inductor.graph").SubgraphLowering
    before = lowering.__init__

    @functools.wraps(before)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        self.bw_donated_idxs = None

    lowering.__init__ = __init__
