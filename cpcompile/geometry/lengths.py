"""Sequence lengths that may be symbols, so that one program serves many lengths.

Note [Symbolic sequence lengths]
Where Dynamo hands a symbol for the length S of the sequence, it stays one if N ranks
divide it and each has two tokens or more: guards say so, and the local length is S // N
on every rank. All other sizes get their value. Facts of S are asked for in three ways:
`expected` is its value in this call, without a guard, for what may be tuned to it;
`is_same` is what holds for all lengths; `require` adds a guard, outside of which Dynamo
compiles again. The guards have to be the same on every rank, or one would compile
while the others run.
"""

from __future__ import annotations

import sympy  # type: ignore[import-untyped]  # sympy ships no type information
import torch

# The shape environment of Dynamo's symbols, seen in torch 2.13.
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

Size = int | torch.SymInt


class LengthNotSymbolic(Exception):
    """The graph cannot serve other lengths than the one it is compiled for."""


def is_symbol(n: object) -> bool:
    """Whether n is a size without a value, not even one that guards have fixed."""
    return isinstance(n, torch.SymInt) and not n.node.expr.is_number


def expected(n: Size) -> int:
    """The value of n in this call; adds no guard."""
    return int(n.node.hint) if isinstance(n, torch.SymInt) else n


def is_same(n: Size, m: Size) -> bool:
    """Whether n and m are equal for all lengths; adds no guard."""
    return statically_known_true(n == m)


def is_divided(n: Size, ranks: int) -> bool:
    """Whether n is a multiple of `ranks` for all lengths; adds no guard."""
    return statically_known_true(n % ranks == 0)


def in_chunks(length: int, chunk: int, ranks: int) -> int:
    """The length as so many equal chunks where it is a symbol.

    What is computed of it then is simple, and needs no guards, on every rank.
    """
    return chunk * ranks if is_symbol(length) else length


def hashable(n: Size) -> object:
    """What is equal for equal sizes; a symbol itself has no hash."""
    return n.node.expr if isinstance(n, torch.SymInt) else n


def require(fact: bool | torch.SymBool) -> None:
    """Add the guard that `fact` holds, as it does in this call."""
    assert fact, f"{fact} does not hold for the length that is compiled"


def guard_region(length: torch.SymInt, low: int, high: int | None) -> None:
    """Compile again for a length that is not low <= length < high; None is no limit."""
    require(length >= low)
    if high is not None:
        require(length < high)


def guards_on(length: torch.SymInt) -> str:
    """Every guard on the length so far, as a text that is the same on equal ranks."""
    environment, symbols = _environment(length), length.node.expr.free_symbols
    texts = {
        str(guard.expr)
        for guard in environment.guards
        if not symbols.isdisjoint(environment.replace(guard.expr).free_symbols)
    }
    ranges = {f"{s} in {environment.var_to_range[s]}" for s in symbols}
    return "; ".join(sorted(texts | ranges))


def is_fixed(length: torch.SymInt, ranks: int) -> bool:
    """Whether the guards leave no other length, as far as its neighbours say."""
    if not is_symbol(length):
        return True
    environment = _environment(length)
    (symbol,) = length.node.expr.free_symbols
    per_symbol = int(length.node.expr.coeff(symbol))  # the symbol may be S / N
    here = expected(length)
    guards = [environment.replace(guard.expr) for guard in environment.guards]
    for other in (here + ranks, here - ranks, 2 * here):
        moved = {symbol: sympy.Integer(other // per_symbol)}
        if not any(guard.xreplace(moved) == sympy.false for guard in guards):
            return False
    return True


def _environment(length: torch.SymInt) -> ShapeEnv:
    environment = length.node.shape_env
    assert isinstance(environment, ShapeEnv)
    return environment
