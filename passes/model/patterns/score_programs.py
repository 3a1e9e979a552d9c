"""Write a score_mod of flex_attention as text, forward and backward.

    score_mod(score, b, h, q_idx, kv_idx)        score * w[h], of a captured w [H]
      ->
    def forward(values, score, b, h, q_idx, kv_idx):
        slice_1 = torch.ops.aten.slice.Tensor(values, 2, 0, 4)
        ...
        where = torch.ops.aten.where.self(visible, mul, lowest)
        return where

Operators compute it part by part, see ops/step/score_mod.py. It is traced with sizes
that are symbols, so that it serves parts of any size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from cpcompile.geometry.lengths import LengthNotSymbolic, is_symbol
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.step.score_mod import index_of
from cpcompile.torch_private.fake_tensors import FakeTensorMode
from cpcompile.torch_private.operators import get_decompositions

_INTEGERS = (int, torch.SymInt)
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31)  # sizes that are not taken for others


@dataclass(frozen=True)
class Captured:
    """A tensor that a score_mod or mask_mod reads, and its place in the values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    first: int

    def read(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Read the tensor from the values [1, 1, n]; floats are read as `dtype`."""
        own = values[0, 0, self.first : self.first + math.prod(self.shape)]
        kind = dtype if self.dtype.is_floating_point else self.dtype
        return own.view(self.shape).to(kind)


def values_dtype(captured: Sequence[Any], q: Tensor) -> torch.dtype:
    """Return a dtype that holds all captured numbers; of integers those up to 2**53."""
    tensors = [x for x in captured if isinstance(x, Tensor)]
    exact = all(x.is_floating_point() and x.itemsize <= 4 for x in tensors)
    return accumulation_dtype(q.dtype) if exact else torch.float64


def can_be_packed(captured: Sequence[Any]) -> bool:
    """Tell whether all captured values are integers, or tensors of real numbers.

    Raises: LengthNotSymbolic for a symbol, or a tensor that has one as a size.
    """
    for x in captured:
        sizes = x.shape if isinstance(x, Tensor) else (x,)
        if any(map(is_symbol, sizes)):
            raise LengthNotSymbolic(
                f"a score_mod captures {', '.join(map(str, sizes))}"
            )
    return all(
        not x.is_complex() if isinstance(x, Tensor) else isinstance(x, _INTEGERS)
        for x in captured
    )


def score_program(
    score_mod: fx.GraphModule,
    mask_mod: fx.GraphModule | None,
    of_score: Sequence[Any],
    of_mask: Sequence[Any],
    q: Tensor,
) -> str | None:
    """Return the text of a score_mod and of what mask_mod hides; None if it has none.

    Random numbers, writes in place and constants that are tensors have none.
    """
    places, first = list[Captured | int](), 0
    for x in (*of_score, *of_mask):
        if isinstance(x, Tensor):
            places.append(Captured(tuple(map(int, x.shape)), x.dtype, first))
            first += int(x.numel())
        else:
            places.append(int(x))
    dtype = accumulation_dtype(q.dtype)
    learned = any(isinstance(x, Tensor) and x.requires_grad for x in of_score)

    def forward(values: Tensor, score: Tensor, *index: Tensor) -> Tensor:
        read = [x.read(values, dtype) if isinstance(x, Captured) else x for x in places]
        new = _only(score_mod(score, *index, *read[: len(of_score)]))
        if mask_mod is not None:
            visible = _only(mask_mod(*index, *read[len(of_score) :]))
            new = torch.where(visible, new, float("-inf"))
        return new.to(dtype).expand(score.shape)

    def backward(values: Tensor, score: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        leaves = [score.detach().requires_grad_()]
        if learned:
            leaves.append(values.detach().requires_grad_())
        new = forward(leaves[1] if learned else values, leaves[0], *rest[:-1])
        gradients = torch.autograd.grad(new, leaves, rest[-1], materialize_grads=True)
        return gradients[0], gradients[1] if learned else torch.zeros_like(values)

    total = max(first, 1)
    packed = torch.zeros(1, 1, total, dtype=values_dtype((*of_score, *of_mask), q))
    texts = []
    sizes = [n for n in _PRIMES if n != total]
    for chosen in (sizes[:4], sizes[4:8]):  # no text depends on them
        score = torch.zeros(chosen, dtype=dtype)
        rows = torch.arange(chosen[2], dtype=torch.int32)
        examples = [packed, score, *index_of(score, rows, 0)]
        examples = [x.to(q.device) for x in examples]
        one = _traced("forward", forward, examples)
        if one is None:
            return None
        two = _traced("backward", backward, [*examples, examples[1].clone()])
        if two is None:
            return None
        texts.append(f"{one}\n\n{two}\n")
    return texts[0] if texts[0] == texts[1] else None


def _only(result: Any) -> Tensor:
    if isinstance(result, tuple | list):
        (result,) = result
    assert isinstance(result, Tensor), f"a score_mod returned {result}"
    return result


def _same(x: Tensor) -> Tensor:
    return x


_WRITTEN_WITH_OTHERS = (
    *("elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish"),
    *("silu", "softplus"),
)


@cache
def _simpler() -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of calls that kernels have no expression for."""
    names = [x + end for x in _WRITTEN_WITH_OTHERS for end in ("", "_backward")]
    names += ["log_sigmoid_forward", "log_sigmoid_backward", "masked_fill"]
    return get_decompositions([getattr(torch.ops.aten, name) for name in names])


def _writes(node: fx.Node) -> bool:
    overload = isinstance(node.target, torch._ops.OpOverload)
    return overload and node.target._schema.is_mutable  # type: ignore[union-attr]


def _traced(
    name: str, function: Callable[..., Any], tensors: Sequence[Tensor]
) -> str | None:
    """Trace a function to text; None if it has to be traced each time."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dims = [
        [DimDynamic.DYNAMIC if n > 1 else DimDynamic.STATIC for n in x.shape]
        for x in tensors
    ]
    # Hooks of whoever compiles, as of a checkpoint, are not for these.
    hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)
    with mode, torch.enable_grad(), hooks:
        fakes = [
            mode.from_tensor(
                x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
            )
            for x, sizes in zip(tensors, dims, strict=True)
        ]
        traced = make_fx(function, decomposition_table=_simpler())(*fakes)
        if any(map(_writes, traced.graph.nodes)):  # torch's gradient of clamp, say
            pure = functionalize(traced, remove="mutations")
            traced = make_fx(pure, decomposition_table=_simpler())(*fakes)
    graph = traced.graph
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.op == "get_attr" or _writes(node):
            return None
        if isinstance(node.target, torch._ops.OpOverload) and (
            torch.Tag.nondeterministic_seeded in node.target.tags
        ):
            return None
    source = graph.python_code("self").src
    return source.strip().replace("def forward(self, ", f"def {name}(", 1)
