"""Compute numbers of sympy formulas, without the 0.1 s of sympy.lambdify for each.

A process asks for a few dozen numbers of each formula, in which the same parts stand
many times; each part is computed once.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]  # sympy ships no type information

_OPERATIONS: dict[type, Callable[..., float]] = {
    sympy.Add: lambda *x: math.fsum(x),
    sympy.Mul: lambda *x: math.prod(x),
    sympy.Pow: operator.pow,
    sympy.Max: max,
    sympy.Min: min,
}


def evaluator(
    symbols: Sequence[sympy.Symbol], formulas: Sequence[sympy.Expr]
) -> Callable[..., list[float]]:
    """Make a function of numbers for `symbols`, in order, that gives all formulas.

    Raises: TypeError for an operation that is not sum, product, power, Max or Min.
    """
    places = {symbol: i for i, symbol in enumerate(symbols)}
    constants: list[tuple[int, float]] = []
    steps: list[tuple[int, Callable[..., float], list[int]]] = []

    def place(x: Any) -> int:
        if x in places:
            return places[x]
        operands = [place(y) for y in x.args]
        number = places[x] = len(places)
        if x.is_Number:
            constants.append((number, float(x)))
        elif x.func in _OPERATIONS:
            steps.append((number, _OPERATIONS[x.func], operands))
        else:
            raise TypeError(f"{x}: {x.func} is no operation of a cost formula")
        return number

    results = [place(sympy.sympify(x)) for x in formulas]

    def evaluate(*numbers: float) -> list[float]:
        values = [*numbers, *[0.0] * (len(places) - len(numbers))]
        for number, constant in constants:
            values[number] = constant
        for number, operation, operands in steps:
            values[number] = operation(*[values[i] for i in operands])
        return [values[i] for i in results]

    return evaluate
