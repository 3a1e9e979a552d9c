"""Values that vary with the query only, with the key only, or with neither.

How they are computed does not matter to a mask: arange, cumsum, diff, a look-up. Values
that depend on no input of the graph are computed here; others stay calls. All have the
dimensions [B or 1, H or 1, Sq or 1, Sk or 1], or none as scalars do, so that types
promote as they do in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ....graph.nodes import reached
from .mask_program import MaskProgram, Unreadable
from .views import MEANINGS, MaskAxis, View, operand, picked, rearranged

aten = torch.ops.aten
_LARGEST = 4  # times all tokens: what may be computed for a vector


@dataclass(frozen=True, eq=False)
class Vector:
    """A value that varies with queries or with keys, not with both.

    like: a tensor on "meta" of its shape and dtype. value: its elements, if they are
    known. Otherwise it is `view`, a part of the program, or the call of `target`.
    """

    like: Tensor
    value: Tensor | None = None
    view: View | None = None
    target: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    @property
    def meanings(self) -> set[str]:
        """Dimensions out of B, H, Q and K along which the value may vary."""
        return {m for m, n in zip(MEANINGS, self.like.shape, strict=False) if n > 1}

    @property
    def is_rows(self) -> bool:
        """True if the value may vary with the query."""
        return "Q" in self.meanings

    @property
    def is_columns(self) -> bool:
        """True if the value may vary with the key."""
        return "K" in self.meanings

    @property
    def is_integer(self) -> bool:
        """True if the elements are integers, or bool."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def constant(self) -> Any:
        """Single value that the vector has everywhere, or None."""
        if self.value is None or self.value.numel() != 1:
            return None
        return self.value.item()


def known(value: Tensor) -> Vector:
    """Make a vector of known values; a dimension where they are equal becomes 1."""
    for dim in range(value.ndim):
        first = value.narrow(dim, 0, 1)
        if value.shape[dim] > 1 and bool((value == first).all()):
            value = first.clone()
    return Vector(torch.empty(value.shape, dtype=value.dtype, device="meta"), value)


def constant(number: Any, dtype: torch.dtype | None = None) -> Vector:
    """Make a vector of one number everywhere."""
    return known(torch.full((1,) * len(MEANINGS), number, dtype=dtype))


def scalar(number: Any) -> Vector:
    """Make a vector of one number without dimensions, which leaves types alone."""
    return known(torch.tensor(number))


def positions(meaning: str, count: int) -> Vector:
    """Make a vector of positions 0, 1, 2 ... of the queries or the keys."""
    shape = [1] * len(MEANINGS)
    shape[MEANINGS.index(meaning)] = count
    return known(torch.arange(count).view(shape))


def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Vector:
    """Apply a pointwise call to vectors that together vary with Q or K only."""
    vectors = [x for x in args if isinstance(x, Vector)]
    like = target(*(x.like if isinstance(x, Vector) else x for x in args), **kwargs)
    if all(x.value is not None for x in vectors):
        values = (x.value if isinstance(x, Vector) else x for x in args)
        return known(target(*values, **kwargs))
    return Vector(like, target=target, args=args, kwargs=kwargs)


def both_axes(*vectors: Any) -> bool:
    """Tell whether vectors together vary with queries and with keys."""
    operands = [x for x in vectors if isinstance(x, Vector)]
    return any(x.is_rows for x in operands) and any(x.is_columns for x in operands)


class VectorReader:
    """Reader of the views of one program as vectors."""

    def __init__(self, program: MaskProgram, tokens: int) -> None:
        self.program = program
        self.tokens = tokens  # B (Sq + Sk)
        self._evaluator = Evaluator(program.module)
        self._vectors: dict[Any, Vector] = {}
        self._from_inputs = from_inputs(program.module.graph)

    def is_static(self, node: fx.Node) -> bool:
        """Tell whether a value does not depend on inputs of the graph."""
        return node not in self._from_inputs

    def read(self, view: View) -> Vector:
        """Read a view that is not pairwise as a vector.

        Raises: Unreadable, if it is computed from more than some values per token, or
        has two dimensions of one meaning.
        """
        if view.key not in self._vectors:
            self._vectors[view.key] = self._read(view)
        return self._vectors[view.key]

    def value(self, view: View) -> Tensor:
        """Compute a view of a static node, [B or 1, H or 1, Sq or 1, Sk or 1]."""
        return normal(self._evaluator.value(view.node), view)

    def original(self, view: View) -> View | None:
        """Return the operand of a call that only rearranges or picks, else None."""
        return rearranged(view) or self._gathered(view)

    def _gathered(self, view: View) -> View | None:
        """Return what is indexed, if each index varies along one dimension at most.

        packed[b, q], with b and q [B, 1, 1, 1] and [1, 1, Sq, 1] ->  packed: B Q
        """
        if view.node.target is aten.index_select.default:
            return self._selected(view, *view.node.args)
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
            at = self.read(operand(view, index))
            if at.value is None or at.dtype != torch.int64:
                return None
            if len(at.meanings) > 1 or bool((at.value.abs() > size).any()):
                return None
            axis = MaskAxis(next(iter(at.meanings), ""), torch.arange(at.value.numel()))
            axes.append(picked(axis, at.value.flatten() % size, size))
        return View(source, tuple(axes))

    def _selected(self, view: View, source: Any, dim: Any, index: Any) -> View | None:
        if not self.is_static(index):
            return None
        index_values, size = self._evaluator.value(index), source.meta["val"].shape[dim]
        axes = list(view.axes)
        axes[dim] = picked(axes[dim], index_values, size)
        return View(source, tuple(axes))

    def _read(self, view: View) -> Vector:
        named = [a.meaning for a in view.axes if a.meaning]
        if len(set(named)) != len(named):
            raise Unreadable(f"{view.node.name} has two dimensions of one meaning")
        require_small(view.node, self.tokens)
        if self.is_static(view.node):
            return known(self.value(view))
        like = torch.empty(view.value.shape, dtype=view.dtype, device="meta")
        return Vector(normal(like, view), view=view)


class Evaluator:
    """Evaluator of nodes that depend on no input of a program, on the CPU."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self._values: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node) -> Any:
        """Compute the value of a node.

        Raises: Unreadable, for an attribute without a value.
        """
        if node not in self._values:
            self._values[node] = self._new(node)
        return self._values[node]

    def forget(self, node: fx.Node) -> None:
        """Give back the memory of a value."""
        self._values.pop(node, None)

    def _new(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            value = getattr(self.module, str(node.target))
            if type(value) is not Tensor:
                raise Unreadable(f"{node.name} has no value yet")
            return value.detach().cpu()
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        assert callable(node.target)
        return node.target(*args, **kwargs)


def from_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose values depend on inputs of a program."""
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or nodes & {*node.all_input_nodes}:
            nodes.add(node)
    return nodes


def require_small(node: fx.Node, tokens: int) -> None:
    """Raise Unreadable if a node is computed from more than some values per token."""
    for made_of in reached([node], lambda x: x.all_input_nodes):
        value = made_of.meta.get("val")
        if made_of.op == "placeholder" or not isinstance(value, Tensor):
            continue
        if value.numel() > _LARGEST * tokens:
            raise Unreadable(f"{made_of.name} {list(value.shape)} is needed in whole")


def normal(x: Tensor, view: View) -> Tensor:
    """Bring a value of a view's node to the dimensions of a mask.

    These are [B or 1, H or 1, Sq or 1, Sk or 1]; a scalar stays one.
    """
    for target, *args in normalising(view):
        on_device = (a.to(x.device) if isinstance(a, Tensor) else a for a in args)
        x = target(x, *on_device)
    return x


def normalising(view: View) -> Iterator[tuple[Any, ...]]:
    """Yield the calls that `normal` makes, each with its arguments after the tensor."""
    if not view.axes:
        return
    sizes = list(view.value.shape)
    for dim, axis in enumerate(view.axes):
        if axis.positions is not None:
            sizes[dim] = len(axis.positions)
            yield aten.index_select.default, dim, axis.positions
    order = [d for m in MEANINGS for d, a in enumerate(view.axes) if a.meaning == m]
    rest = [d for d in range(len(sizes)) if d not in order]
    yield aten.permute.default, rest + order
    shape = [1] * len(MEANINGS)
    for d in order:
        shape[MEANINGS.index(view.axes[d].meaning)] = sizes[d]
    yield aten.reshape.default, shape
