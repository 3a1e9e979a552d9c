"""Numbers of formulas are those that sympy itself computes."""

import pytest
import sympy

from cpcompile.cost.evaluate import evaluator
from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.plans import SEQUENCE_STRATEGIES
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.cost.symbols import SYMBOLS, numbers
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from tests.unit.cost.cost_cases import workload

FORMULAS = [
    expression
    for strategy in SEQUENCE_STRATEGIES
    for backward in (False, True)
    for expression in STRATEGIES[strategy].cost(True, Layout.CONTIGUOUS, backward)
]


@pytest.mark.parametrize("machine", ["cpu", "h100_sxm", "mi300x"])
@pytest.mark.parametrize("tokens", [64, 8191, 2**20])
def test_every_cost(machine, tokens):
    load = workload(length=tokens, causal=True, ranks=8)
    found = numbers(load, CPDegrees(2, 4), load_profile(machine))
    given = [found[symbol] for symbol in SYMBOLS]
    exact = sympy.lambdify(SYMBOLS, FORMULAS, "mpmath", cse=True)(*given)
    got = evaluator(SYMBOLS, FORMULAS)(*given)
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
