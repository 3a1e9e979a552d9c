"""Find the rows of which a call makes rows, or tokens.

y = conv2d(x, weight, stride=2)    rows of y, in dimension 2, are made of those of x
y = x.flatten(2)                   the tokens of y are made of the rows of x
"""

from __future__ import annotations

import torch.fx as fx

from ...flow.view_chain import follow
from ...graph.calls import canonical_call, spelled
from ..normalize.pad_convolutions import CONVOLUTIONS

NORMS = ("batch_norm", "group_norm", "instance_norm")

OF_POSITIONS = (
    *CONVOLUTIONS,
    *(f"{name}{n}d" for name in ("avg_pool", "max_pool") for n in (1, 2, 3)),
    *(
        f"{name}{n}d"
        for name in ("adaptive_avg_pool", "conv_transpose")
        for n in (1, 2, 3)
    ),
    "interpolate",
    *NORMS,
)
"""Calls that make positions of those of their input, in the same dimensions."""


def rows_before(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    """Return the rows that a call makes rows or tokens of, where it has some."""
    if spelled(node) in OF_POSITIONS:
        return canonical_call(node).arguments["input"], dim
    chain = follow(node)
    source, last = chain[0], chain[-1]
    if source.node is node or dim >= len(last.dims):
        return None
    parts = dict.fromkeys(x.dim for x in last.dims[dim] if x.dim is not None)
    if not parts or (0 in parts and len(parts) > 1):
        return None  # a batch, of windows or of images, is not followed
    return source.node, next(iter(parts))
