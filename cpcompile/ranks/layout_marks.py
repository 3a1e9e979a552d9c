"""Which layout the tokens of a DTensor are in, where the user chose one.

A DTensor of a permuted sequence looks like any other: `cp.shard(..., layout=...)`
remembers the layout in an attribute, which a compiled graph reads and guards. Results
of operators do not have it, and count as tokens in order.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.geometry.layout import Layout

ATTRIBUTE = "_cp_layout"
# On the class, so that every DTensor has one and guards need not ask whether.
setattr(DTensor, ATTRIBUTE, Layout.CONTIGUOUS.value)

_layouts: set[Layout] = set()


def mark(x: Tensor, layout: Layout) -> None:
    """The tokens of `x` are in `layout`."""
    setattr(x, ATTRIBUTE, layout.value)
    if layout is not Layout.CONTIGUOUS:
        _layouts.add(layout)


def layout_of(x: Tensor) -> Layout:
    """The layout of the tokens of `x`."""
    return Layout(getattr(x, ATTRIBUTE, Layout.CONTIGUOUS.value))


def is_marked(x: Tensor) -> bool:
    """Whether the layout of `x` is known, and not that of just any DTensor."""
    return ATTRIBUTE in vars(x)


def forget() -> None:
    """No tensor that was marked is there any more."""
    _layouts.clear()


def layouts_in_use() -> list[str]:
    """The names of the layouts but the contiguous one that were ever marked."""
    return sorted(layout.value for layout in _layouts)
