"""Let torch compute the parts that ranks have of a length of several symbols.

Where torch 2.13 fails, by private interfaces:

- Chunks of 3 c - m tokens are (3 c - m + 2) // 3, which torch knows as
  c + (2 - m) // 3, and not as c, which it is for 0 < m < 3.
- DTensor compares the bytes of ways to move a value, and each comparison becomes a
  guard on the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.distributed.tensor import _collective_utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.functions import FloorDiv

from cpcompile.geometry.lengths import expected


@contextmanager
def stay_exact() -> Iterator[None]:
    """Compute such parts as the module says."""
    divided = _divided(SymNode.int_floordiv)
    with (
        mock.patch.object(SymNode, "int_floordiv", divided),
        mock.patch.object(_collective_utils, "spec_to_bytes", _bytes_here),
    ):
        yield


def _bytes_here(spec: DTensorSpec) -> int:
    """Return the bytes in this call: which way is cheaper makes no guard."""
    meta = spec.tensor_meta
    assert meta is not None, "what is moved has a shape"
    return math.prod(map(expected, meta.shape)) * meta.dtype.itemsize


def _divided(divide: Callable[..., Any]) -> Callable[..., Any]:
    """Give parts of a quotient that have one value only that value."""

    def divided(one: Any, other: Any) -> Any:
        result = divide(one, other)
        expression, environment = result.expr, result.shape_env
        values = {}
        for part in expression.atoms(FloorDiv):
            bounds = environment.bound_sympy(part)
            if bounds.is_singleton():
                values[part] = bounds.lower
        if not values:
            return result
        return SymNode(expression.xreplace(values), environment, int, result.hint)

    return divided
