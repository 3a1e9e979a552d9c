"""Results whose parts wait to be combined, and calls that combine them wrongly.

Note [Sums that wait]
A reduction over a sharded dimension gives every rank a part, and DTensor combines the
parts when a call needs it. Sums may wait, and so may maxima, minima and averages. But
(torch 2.13) the parts of a norm and of torch.any count as sums too: x.norm(dim=1).sum()
would add up norms of parts, and mask.any(1).float() count ranks. These, and products,
are combined at once (cp_whole); a call that adds them up inside is not left to DTensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def must_not_wait(x: Any) -> bool:
    """Whether x has parts that DTensor takes for what they are not."""
    return isinstance(x, DTensor) and any(
        p.is_partial() and (p not in _MAY_WAIT or x.dtype == torch.bool)
        for p in x.placements
    )


_MAY_WAIT = tuple(Partial(kind) for kind in ("sum", "avg", "max", "min"))


class MisreadParts(TorchDispatchMode):
    """Sees whether such parts go into a call whose result waits again."""

    found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.found and not _keeps_parts(func):
            given = pytree.tree_leaves((args, kwargs))
            self.found = any(map(must_not_wait, given)) and any(
                p.is_partial()
                for x in pytree.tree_leaves(result)
                if isinstance(x, DTensor)
                for p in x.placements
            )
        return result


def _keeps_parts(func: Any) -> bool:
    """Whether a call does nothing with the numbers."""
    returns = func._schema.returns
    return func is aten.clone.default or any(r.alias_info for r in returns)
