"""Lengths that the ranks do not divide, as symbols: 4 c - 1 tokens on 4 ranks."""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]  # has no types
import torch

from cpcompile.geometry.lengths import (
    Size,
    environment_of,
    expected,
    is_divided,
    require,
)
from cpcompile.torch_private.fake_tensors import Mod


def few_more(n: Size, ranks: int) -> Size:
    """Return what n has beyond a multiple of `ranks`: -1 of 4 c - 1; 0 of a number.

    That is no symbol, or one in a range of `ranks`, as of the tokens that are missing.
    """
    if not isinstance(n, torch.SymInt) or n.node.expr.is_number:
        return 0
    # Not by calculating with sizes, which a trace would take for a part of the program.
    environment, expression = environment_of(n), n.node.expr
    few = sympy.Add(
        *(x for x in sympy.Add.make_args(expression) if not _divides(n, x, ranks))
    )
    bounds = environment.bound_sympy(few)
    if few.is_number or bounds.upper - bounds.lower > ranks:
        return int(expression.as_coeff_Add()[0])
    hint = int(few.xreplace(environment.backed_var_to_val))
    size: Size = environment.create_symintnode(few, hint=hint)
    return size


def _divides(n: torch.SymInt, term: sympy.Expr, ranks: int) -> bool:
    factor, rest = term.as_coeff_Mul()
    if factor % ranks == 0 or rest == 1:
        return bool(factor % ranks == 0)
    return bool(environment_of(n).simplify(Mod(abs(factor) * rest, ranks)) == 0)


def is_cut_for_all(n: Size, ranks: int) -> bool:
    """Tell whether `ranks` divide n, but for few entries that it has more or less.

    Then the parts of all ranks are known for every length (Chunks.size).
    """
    return is_divided(n - few_more(n, ranks), ranks)


def rounded_up(n: Size, ranks: int) -> int:
    """Return n / ranks, rounded up; guard lengths for which that is another number."""
    whole = -(-expected(n) // ranks)
    if isinstance(n, torch.SymInt):
        require(n > (whole - 1) * ranks)
        require(n <= whole * ranks)
    return whole


def lower_limit(length: torch.SymInt) -> int:
    """Return the smallest length that guards leave."""
    return int(environment_of(length).bound_sympy(length.node.expr).lower)
