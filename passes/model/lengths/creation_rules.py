"""Values with tokens that are made from none: positions, zeros, rows of a table."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from cpcompile.geometry.lengths import is_symbol

from ...graph.calls import Call
from ...graph.nodes import fake_value
from ...graph.sequence_tokens import TokenAxis, Tokens
from .indexing import FromTheEnd, indexed
from .padded_tokens import Unproved
from .sizes import Sizes

FILLED = {
    "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty",
    "empty_like",
}  # fmt: skip
_REPEATED = {"expand", "broadcast_to"}


def beginning(node: fx.Node, call: Call, sizes: Sizes) -> Tokens | None:
    """Return the tokens of a result each of which is the same whatever the length is.

    None if no size of the result depends on the length. Raises: Unproved.
    """
    leaves = pytree.tree_leaves(fake_value(node))
    dims = [sizes.reaching(x) for x in leaves if isinstance(x, Tensor)]
    if not any(dims):
        return None
    if len(dims) > 1:
        raise Unproved("several results depend on the length")
    if call.name == "getitem":
        found = indexed(node, sizes_in(node.args[1]), None, sizes.extra_of)
        assert not isinstance(found, FromTheEnd), "a table has no end"
        return found
    dim = dims[0][0]
    extra = sizes.extra_of(fake_value(node).shape[dim])
    if extra is None:
        raise Unproved("a size depends on the length")
    if call.name == "arange":
        start, step = (call.arguments.get(k, n) for k, n in (("start", 0), ("step", 1)))
        if not isinstance(start, int) or step != 1:
            raise Unproved("positions begin at the length, or go in steps")
    elif call.name not in FILLED | _REPEATED:
        raise Unproved("it makes as many numbers as there are tokens")
    return Tokens(TokenAxis(dim), extra)


def sizes_in(index: Any) -> Any:
    """Return an index with the values of its sizes; tensors stay nodes."""

    def value(x: fx.Node) -> Any:
        found = fake_value(x)
        if isinstance(found, torch.SymInt) and not is_symbol(found):
            return int(found)  # its guard is there
        return x if isinstance(found, Tensor) else found

    return fx.map_arg(index, value)
