"""Numbers of formulas are those that sympy itself computes."""

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from cpcompile.cost.evaluate import evaluator
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.cost.symbols import SYMBOLS
from cpcompile.plans import SEQUENCE_STRATEGIES, Layout

FORMULAS = [
    expression
    for strategy in SEQUENCE_STRATEGIES
    for backward in (False, True)
    for expression in STRATEGIES[strategy]
    .cost(True, Layout.CONTIGUOUS, backward)
    .expressions()
]
NUMBERS = st.lists(st.floats(1, 1e6), min_size=len(SYMBOLS), max_size=len(SYMBOLS))


@given(NUMBERS)
def test_every_cost(numbers):
    exact = sympy.lambdify(SYMBOLS, FORMULAS, "mpmath", cse=True)(*numbers)
    got = evaluator(SYMBOLS, FORMULAS)(*numbers)
    assert got == pytest.approx([float(x) for x in exact], rel=1e-12)


def test_shared_parts_and_constants():
    x, y = sympy.symbols("x y")
    part = sympy.Max(x, y, evaluate=False) ** 2
    formulas = (part + sympy.Rational(1, 4), part / 2, sympy.Integer(3), x)
    assert evaluator((x, y), formulas)(2.0, 3.0) == [9.25, 4.5, 3.0, 2.0]


def test_another_operation_is_refused():
    x = sympy.Symbol("x")
    with pytest.raises(TypeError, match=r"sin\(x\): sin is no operation"):
        evaluator((x,), (sympy.sin(x),))
