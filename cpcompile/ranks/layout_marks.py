"""Remember which layout the tokens of a DTensor are in, where the user chose one.

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
    """Mark the tokens of `x` as being in `layout`."""
    setattr(x, ATTRIBUTE, layout.value)
    if layout is not Layout.CONTIGUOUS:
        _layouts.add(layout)


def layout_of(x: Tensor) -> Layout:
    return Layout(getattr(x, ATTRIBUTE, Layout.CONTIGUOUS.value))


def is_marked(x: Tensor) -> bool:
    """Tell whether the layout of `x` is known, and not just the default of DTensors."""
    return ATTRIBUTE in vars(x)


def forget() -> None:
    """Forget the layouts in use: no tensor that was marked is there any more."""
    _layouts.clear()


def layouts_in_use() -> list[str]:
    """Return the names of the marked layouts, except the contiguous one."""
    return sorted(layout.value for layout in _layouts)
