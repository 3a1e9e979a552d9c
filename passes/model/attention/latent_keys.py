"""Let every rank make the keys and values of a call of gathered latents.

    k = up(latent)                             [B, S, D], cut along S
      ->
    latent_1 = constraint(latent, KEY_SOURCE, 1)
    weight_1 = constraint(weight, KEY_SOURCE, None)
    k_1 = constraint(up_1(latent_1), COMPUTED_KEYS)   all of it, on every rank

What else reads k reads the old one. In the backward all of this is done again.
"""

from __future__ import annotations

import torch.fx as fx
from torch import Tensor

from ...graph.context import KeySources
from ...graph.nodes import RECOMPUTE_LAST, fake_value, insert_call
from ...graph.sequence_tokens import Wanted, constraint


class LatentKeys:
    """The calls that every rank makes for one attention."""

    def __init__(self, sources: KeySources, backward: bool) -> None:
        self.sources, self.backward = sources, backward
        self.copies: dict[fx.Node, fx.Node] = {}

    def of(self, x: fx.Node) -> fx.Node:
        """Return what stands for keys or values, before the insertion point."""
        args, value = (self._whole(x), Wanted.COMPUTED_KEYS), fake_value(x)
        made = insert_call(x.graph, constraint, args, like=x, value=value)
        return self._tagged(made)

    def _whole(self, x: fx.Node) -> fx.Node:
        """Return the node that every rank has of a value."""
        if x not in self.copies:
            if x in self.sources.computed:
                args, kwargs = fx.map_arg((x.args, x.kwargs), self._whole)
                with x.graph.inserting_after(x):
                    copy = x.graph.node_copy(x, lambda operand: operand)
                copy.args, copy.kwargs, copy.meta = args, kwargs, dict(x.meta)
                self.copies[x] = self._tagged(copy)
            elif isinstance(fake_value(x), Tensor):
                self.copies[x] = self._source(x)
            else:
                return x  # a size
        return self.copies[x]

    def _source(self, x: fx.Node) -> fx.Node:
        last = x
        if x.op == "placeholder":
            last = x.graph.find_nodes(op="placeholder")[-1]
        args = (x, Wanted.KEY_SOURCE, self.sources.gathered.get(x))
        with x.graph.inserting_after(last):
            value = fake_value(x)
            source = insert_call(x.graph, constraint, args, like=x, value=value)
        return self._tagged(source)

    def _tagged(self, node: fx.Node) -> fx.Node:
        """Have the backward make a value again, as it does what a region holds."""
        if self.backward:
            node.meta |= RECOMPUTE_LAST
        return node
