"""Values that vary with the query only, with the key only, or with neither.

How they are computed does not matter to a mask: arange, cumsum, diff, a look-up. Those
that depend on no input of the graph are worked out here, others stay calls. All have
the dimensions [B or 1, H or 1, Sq or 1, Sk or 1], or none as scalars do, so that types
promote as they do in the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

# Private, in torch 2.13.
from torch.utils._python_dispatch import _disable_current_modes

from cpcompile.passes.mask_program import MaskProgram, Unreadable
from cpcompile.passes.mask_views import MEANINGS, Axis, View, operand, rearranged

aten = torch.ops.aten
# Calls whose result has one value, whatever tensor they take its shape from.
FILLS: dict[Any, Callable[[fx.Node], Any]] = {
    aten.full.default: lambda node: node.args[1],
    aten.full_like.default: lambda node: node.args[1],
    aten.new_full.default: lambda node: node.args[2],
    aten.fill.Scalar: lambda node: node.args[1],
    aten.ones.default: lambda node: 1,
    aten.ones_like.default: lambda node: 1,
    aten.new_ones.default: lambda node: 1,
    aten.zeros.default: lambda node: 0,
    aten.zeros_like.default: lambda node: 0,
    aten.new_zeros.default: lambda node: 0,
}
# Calls that take nothing but a shape from the first argument.
OVERWRITES = (aten.copy.default, aten.fill.Tensor)
_LARGEST = 4  # times all tokens: what may be computed for a vector


@dataclass(frozen=True, eq=False)
class Vector:
    """A value that varies with queries or keys, not with both.

    like: a tensor on "meta" of its shape and dtype. value: if it is known. Otherwise it
    is `view`, a part of the program, or the call of `target`.
    """

    like: Tensor
    value: Tensor | None = None
    view: View | None = None
    target: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.like.dtype

    @property
    def meanings(self) -> set[str]:
        """Along which of B, H, Q and K it may vary."""
        return {m for m, n in zip(MEANINGS, self.like.shape, strict=False) if n > 1}

    @property
    def is_rows(self) -> bool:
        """Whether it may vary with the query."""
        return "Q" in self.meanings

    @property
    def is_columns(self) -> bool:
        """Whether it may vary with the key."""
        return "K" in self.meanings

    @property
    def is_integer(self) -> bool:
        """Whether its elements are integers, or bool."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def constant(self) -> Any:
        """The one value it has everywhere, or None."""
        if self.value is None or self.value.numel() != 1:
            return None
        return self.value.item()


def values_of(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values, not only their shapes, make the value of a node."""
    if node.target in FILLS:
        return []
    if node.target in OVERWRITES:
        return [n for n in node.args[1:] if isinstance(n, fx.Node)]
    return node.all_input_nodes


def known(value: Tensor) -> Vector:
    """A vector whose values are known; what is equal everywhere is so once."""
    for dim in range(value.ndim):
        first = value.narrow(dim, 0, 1)
        if value.shape[dim] > 1 and bool((value == first).all()):
            value = first.clone()
    return Vector(torch.empty(value.shape, dtype=value.dtype, device="meta"), value)


def positions(meaning: str, count: int) -> Vector:
    """0, 1, 2 ... of the queries or the keys."""
    shape = [1] * len(MEANINGS)
    shape[MEANINGS.index(meaning)] = count
    return known(torch.arange(count).view(shape))


def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Vector:
    """A pointwise call on vectors that together vary with queries or with keys only."""
    vectors = [x for x in args if isinstance(x, Vector)]
    like = target(*(x.like if isinstance(x, Vector) else x for x in args), **kwargs)
    if all(x.value is not None for x in vectors):
        values = (x.value if isinstance(x, Vector) else x for x in args)
        with _disable_current_modes():
            return known(target(*values, **kwargs))
    return Vector(like, target=target, args=args, kwargs=kwargs)


def both_axes(*vectors: Any) -> bool:
    """Whether these together vary with queries and with keys."""
    given = [x for x in vectors if isinstance(x, Vector)]
    return any(x.is_rows for x in given) and any(x.is_columns for x in given)


class VectorReader:
    """Makes vectors of views of one program."""

    def __init__(self, program: MaskProgram, tokens: int) -> None:
        self.program = program
        self.tokens = tokens  # B (Sq + Sk)
        self._values: dict[fx.Node, Tensor] = {}
        self._vectors: dict[Any, Vector] = {}
        self._from_inputs: set[fx.Node] = set()
        for node in program.module.graph.nodes:
            if node.op == "placeholder" or any(
                n in self._from_inputs for n in values_of(node)
            ):
                self._from_inputs.add(node)

    def is_static(self, node: fx.Node) -> bool:
        """Whether the value does not depend on inputs of the graph."""
        return node not in self._from_inputs

    def read(self, view: View) -> Vector:
        """The vector of a view that is not pairwise.

        Raises: Unreadable, if it is computed from more than some values per token.
        """
        if view.key not in self._vectors:
            self._vectors[view.key] = self._read(view)
        return self._vectors[view.key]

    def gathered(self, view: View) -> View | None:
        """What an index picks from, if each index varies along one dimension at most.

        packed[b, q], with b and q [B, 1, 1, 1] and [1, 1, Sq, 1] ->  packed: B Q
        """
        if view.node.target is not aten.index.Tensor:
            return None
        source, indices = view.node.args
        assert isinstance(source, fx.Node) and isinstance(indices, list | tuple)
        shape = source.meta["val"].shape
        if len(indices) != len(shape) or not all(
            isinstance(i, fx.Node) and self.is_static(i) for i in indices
        ):
            return None
        axes = []
        for index, size in zip(indices, shape, strict=True):
            assert isinstance(index, fx.Node)
            picked = self.read(operand(view, index))
            if picked.value is None or picked.dtype != torch.int64:
                return None
            if len(picked.meanings) > 1 or bool((picked.value.abs() > size).any()):
                return None
            at = picked.value.flatten() % size
            in_order = len(at) == size and torch.equal(at, torch.arange(size))
            meaning = next(iter(picked.meanings), "")
            axes.append(Axis(meaning, None if in_order else at))
        return View(source, tuple(axes))

    def is_count(self, vector: Vector) -> bool:
        """Whether it is known to be made of numbers from 0 to that of the tokens."""
        if vector.value is not None:
            small = vector.value.numel() <= self.tokens
            return small and bool(((vector.value >= 0) & (vector.value < 2**31)).all())
        view = vector.view
        while view is not None:
            behind = rearranged(view) or self.gathered(view)
            if behind is None:
                break
            view = behind
        if view is None or view.node.target is not aten.cumsum.default:
            return False
        counted = view.node.args[0]
        assert isinstance(counted, fx.Node)
        return counted.meta["val"].dtype == torch.bool and view.dtype == torch.int64

    def _read(self, view: View) -> Vector:
        named = [a.meaning for a in view.axes if a.meaning]
        if len(set(named)) != len(named):
            raise Unreadable(f"{view.node.name} has two dimensions of one meaning")
        if self.is_static(view.node):
            with _disable_current_modes(), torch.no_grad():
                return known(normal(self.evaluate(view.node), view))
        require_small(view.node, self.tokens)
        with _disable_current_modes():
            like = torch.empty(view.value.shape, dtype=view.dtype, device="meta")
            return Vector(normal(like, view), view=view)

    def evaluate(self, node: fx.Node) -> Tensor:
        """The value of a node that depends on no input, on the CPU."""
        if node in self._values:
            return self._values[node]
        require_small(node, self.tokens)
        needed: set[fx.Node] = set()
        stack = [node]
        while stack:
            each = stack.pop()
            if each not in needed and each not in self._values:
                needed.add(each)
                stack.extend(values_of(each))
        for each in self.program.module.graph.nodes:
            if each in needed:
                self._values[each] = self._run(each)
        return self._values[node]

    def _run(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            constant = getattr(self.program.module, str(node.target))
            if not isinstance(constant, Tensor) or type(constant) is not Tensor:
                raise Unreadable(f"{node.name} has no value yet")
            return constant.detach().cpu()
        if node.target in FILLS or node.target in OVERWRITES:
            like: Tensor = node.meta["val"]
            if node.target in FILLS:
                return torch.full(
                    like.shape, FILLS[node.target](node), dtype=like.dtype
                )
            (source,) = values_of(node)
            return self._values[source].to(like.dtype).expand(like.shape)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        assert callable(node.target)
        return node.target(*args, **kwargs)


def require_small(node: fx.Node, tokens: int) -> None:
    """Raise Unreadable if a node is computed from more than some values per token."""
    stack, seen = [node], set()
    while stack:
        node = stack.pop()
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.numel() > _LARGEST * tokens:
            raise Unreadable(f"{node.name} {list(value.shape)} is needed in whole")
        stack.extend(values_of(node))


def normal(x: Tensor, view: View) -> Tensor:
    """A value of a view's node as [B or 1, H or 1, Sq or 1, Sk or 1], or a scalar."""
    if not x.ndim:
        return x
    for dim, axis in enumerate(view.axes):
        if axis.positions is not None:
            x = x.index_select(dim, axis.positions.to(x.device))
    order = [d for m in MEANINGS for d, a in enumerate(view.axes) if a.meaning == m]
    rest = [d for d in range(x.ndim) if d not in order]
    shape = [1] * len(MEANINGS)
    for d in order:
        shape[MEANINGS.index(view.axes[d].meaning)] = x.shape[d]
    return x.permute(rest + order).reshape(shape)
