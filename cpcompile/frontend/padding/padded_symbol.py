"""A symbol for a length that is rounded up to a multiple of the number of ranks.

Dynamo's guards are on what the caller passes, and the padded length P comes from the
length S that he passes. So P has a source of its own, an expression of S: guards on P
become guards on S.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy ships no type information
import torch

# Private, in torch 2.13 and 2.15: what Dynamo makes guards on sizes of.
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, TrackedFake

from cpcompile.geometry.lengths import LengthNotSymbolic, expected, require
from cpcompile.torch_private.dynamo import Source


@dataclass(frozen=True)
class _RoundedUp(Source):
    """The source of a size: `base`, rounded up to a multiple of `ranks`."""

    base: Source
    ranks: int

    @cached_property
    def guard_source(self) -> Any:
        return self.base.guard_source

    @property
    def _name_template(self) -> str:
        return f"(-(-{self.base.name} // {self.ranks}) * {self.ranks})"


def rounded_up(n: int, ranks: int) -> int:
    """Return the smallest multiple of `ranks` that is not below n."""
    return -(-n // ranks) * ranks


def padded_symbol(length: torch.SymInt, ranks: int) -> torch.SymInt:
    """Return a symbol P for `length` rounded up; what holds for `length` holds for P.

    What Dynamo asked of the length while it traced is asked of P as well. So its trace
    of P tokens would be the same.

    Raises: LengthNotSymbolic if some of it does not hold for P.
    """
    environment, symbol = length.node.shape_env, length.node.expr
    assert isinstance(environment, ShapeEnv)
    if not symbol.is_Symbol or environment.tracked_fakes is None:
        raise LengthNotSymbolic("the length is computed from others")
    asked = [environment.replace(guard.expr) for guard in environment.guards]
    limits = environment.var_to_range[symbol]
    source = _RoundedUp(environment.var_to_sources[symbol][0], ranks)
    value = rounded_up(expected(length), ranks)
    new = environment.create_symbol(value, source, dynamic_dim=DimDynamic.DYNAMIC)
    padded = environment.create_symintnode(new, hint=value, source=source)
    if not isinstance(padded, torch.SymInt):
        raise LengthNotSymbolic("the padded length is a number")
    environment.tracked_fakes.append(TrackedFake(padded, source, None))
    if sympy.sympify(limits.upper).is_Integer:
        asked.append(sympy.Le(symbol, limits.upper))
    for fact in asked:
        if symbol in fact.free_symbols:
            same = environment.evaluate_expr(fact.xreplace({symbol: new}))
            if same != sympy.true:
                raise LengthNotSymbolic(f"{fact} does not hold for the padded length")
    require(padded % ranks == 0)
    require(padded >= 2 * ranks)
    return padded
