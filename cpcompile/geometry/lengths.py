"""Sequence lengths that may be symbols, so that one program serves many lengths.

Note [Symbolic sequence lengths]
Where Dynamo hands a symbol for the length S of the sequence, it stays one if each of N
ranks has two tokens or more: guards say so, and whether N divides S. What ranks have is
written in symbols of its own (Note [Tokens per rank]). Of plain inputs of one length
the number of rows may be a symbol instead. All other sizes get their value. Facts of S
are asked for in three ways:
`expected` is its value in this call, without a guard, for what may be tuned to it;
`is_same` is what holds for all lengths; `require` adds a guard, outside of which Dynamo
compiles again. The guards have to be the same on every rank, or one would compile
while the others run.
"""

from __future__ import annotations

import math

import sympy  # type: ignore[import-untyped]  # sympy ships no type information
import torch

# The shape environment of Dynamo's symbols, seen in torch 2.13.
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

from cpcompile.torch_private.fake_tensors import Max, Mod

Size = int | torch.SymInt
_ASSUMED = 8192  # unbacked_symint_fallback of torch._inductor.config


class LengthNotSymbolic(Exception):
    """The error that a graph can serve no length but the one it is compiled for."""


def is_symbol(n: object) -> bool:
    """Tell whether n is a size without a value, not even one that guards have fixed."""
    return isinstance(n, torch.SymInt) and not n.node.expr.is_number


def expected(n: Size) -> int:
    """Return the value of n in this call; add no guard.

    A size that only data tells has none, and counts as what Inductor assumes.
    """
    if not isinstance(n, torch.SymInt):
        return n
    hint = n.node.hint
    return _ASSUMED if hint is None else int(hint)


def is_same(n: Size, m: Size) -> bool:
    """Tell whether n and m are equal for all lengths; add no guard."""
    return statically_known_true(n == m)


def is_divided(n: Size, ranks: int) -> bool:
    """Tell whether n is a multiple of `ranks` for all lengths; add no guard."""
    return statically_known_true(n % ranks == 0)


def in_chunks(length: int, chunk: int, ranks: int) -> int:
    """Return the length as `ranks` equal chunks if it is a symbol, else as it is.

    What is computed from it then is simple, and needs no guards, on every rank.
    """
    divided = is_symbol(length) and is_divided(length, ranks)
    return chunk * ranks if divided else length


def times(n: Size, tokens: Size) -> int:
    """Return k if n = k tokens for all lengths, 0 if k is no number; add no guard."""
    here, per = expected(n), expected(tokens)
    if not per or here % per:
        return 0
    ratio = sympy.cancel(sympy.sympify(hashable(n)) / sympy.sympify(hashable(tokens)))
    return here // per if ratio == here // per else 0


def hashable(n: Size) -> object:
    """Return a value that is equal for equal sizes; a symbol itself has no hash."""
    return n.node.expr if isinstance(n, torch.SymInt) else n


def plain_size(n: torch.SymInt) -> sympy.Expr:
    """Return the expression of n, without Max(1, m) of sizes m that are never 0.

    torch writes some strides with such a Max, and others without.
    """
    environment = environment_of(n)

    def least_one(one: sympy.Expr, m: sympy.Expr) -> sympy.Expr:
        never_0 = one == 1 and environment.bound_sympy(m).lower >= 1
        return m if never_0 else Max(one, m)

    size: sympy.Expr = n.node.expr
    for maximum in size.atoms(Max):
        if len(maximum.args) == 2:
            size = size.xreplace({maximum: least_one(*maximum.args)})
    return size


def require(fact: bool | torch.SymBool) -> None:
    """Add the guard that `fact` holds, as it does in this call."""
    assert fact, f"{fact} does not hold for the length that is compiled"


def guard_region(length: torch.SymInt, low: int, high: int | None) -> None:
    """Compile again for a length that is not low <= length < high; None is no limit."""
    require(length >= low)
    if high is not None:
        require(length < high)


def guards_on(length: torch.SymInt) -> str:
    """Return every guard on the length so far, as a text that is equal on equal ranks.

    Guards that hold for every length that the ranks divide are left out: which of them
    are asked for may depend on the rank, as for the end of a slice that begins at its
    part.
    """
    environment, symbols = environment_of(length), length.node.expr.free_symbols
    guards = {_of_remainders(guard.expr, environment) for guard in environment.guards}
    chunked = _in_chunks_of_the_ranks(guards, environment)
    texts = {
        str(guard)
        for guard in guards
        if not symbols.isdisjoint(guard.free_symbols)
        and (_divisor(guard) or guard.xreplace(chunked) != sympy.true)
    }
    ranges = {f"{s} in {environment.var_to_range[s]}" for s in symbols}
    return "; ".join(sorted(texts | ranges))


def _of_remainders(guard: sympy.Basic, environment: ShapeEnv) -> sympy.Basic:
    """Write n for n % m in a guard if all n are less than all m."""
    guard = environment.replace(guard)
    numbers = {}
    for remainder in guard.atoms(Mod):
        n, m = map(environment.bound_sympy, remainder.args)
        if n.lower >= 0 and n.upper < m.lower:
            numbers[remainder] = remainder.args[0]
    return guard.xreplace(numbers)


def _in_chunks_of_the_ranks(
    guards: set[sympy.Basic], environment: ShapeEnv
) -> dict[sympy.Symbol, sympy.Expr]:
    """Write each symbol that guards make a multiple of n as n times a positive one.

    Of a symbol that is known to be large the chunk is at least so large.
    """
    divisors: dict[sympy.Symbol, int] = {}
    for guard in guards:
        if n := _divisor(guard):
            (symbol,) = guard.free_symbols
            divisors[symbol] = math.lcm(n, divisors.get(symbol, 1))
    chunked = {}
    for symbol, n in divisors.items():
        positive = sympy.Symbol(f"chunk_of_{symbol}", integer=True, positive=True)
        lower = environment.var_to_range[symbol].lower
        least = -(-int(lower) // n) if lower.is_Integer else 1
        chunked[symbol] = n * (positive + max(least, 1) - 1)
    return chunked


def _divisor(guard: sympy.Basic) -> int:
    """Return n if the guard says that n divides a symbol; else 0."""
    if not (
        isinstance(guard, sympy.Eq) and guard.rhs == 0 and isinstance(guard.lhs, Mod)
    ):
        return 0
    symbol, n = guard.lhs.args
    return int(n) if symbol.is_Symbol and n.is_Integer else 0


def upper_limit(length: torch.SymInt) -> int:
    """Return the largest length that guards leave; a huge one without such a guard."""
    symbols = length.node.expr.free_symbols
    ranges = environment_of(length).var_to_range
    if not all(ranges[symbol].upper.is_Integer for symbol in symbols):
        return 2**62
    values = {symbol: ranges[symbol].upper for symbol in symbols}
    return int(length.node.expr.xreplace(values))


def is_fixed(length: torch.SymInt, ranks: int) -> bool:
    """Tell whether the guards leave no other length, judged by three other lengths.

    They are `ranks` tokens more, `ranks` tokens less, and twice the length of this
    call.
    """
    if not is_symbol(length):
        return True
    environment, expression = environment_of(length), length.node.expr
    # The number of tokens that a rank has may be the symbol, with another for the rest.
    symbol = max(expression.free_symbols, key=expression.coeff)
    step = max(ranks // int(expression.coeff(symbol)), 1)
    values = {x: environment.backed_var_to_val[x] for x in expression.free_symbols}
    guards = [environment.replace(guard.expr) for guard in environment.guards]
    here = values[symbol]
    for other in (here + step, here - step, 2 * here):
        moved = values | {symbol: other}
        if not any(guard.xreplace(moved) == sympy.false for guard in guards):
            return False
    return True


def environment_of(length: torch.SymInt) -> ShapeEnv:
    """Return what knows the symbols of a length."""
    environment = length.node.shape_env
    assert isinstance(environment, ShapeEnv)
    return environment
