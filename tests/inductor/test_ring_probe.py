"""A tiny ring tells whether this torch unrolls rings; if not, they stay operators."""

import pytest
import torch

from cpcompile.compile.ring_probe import ring_problem
from cpcompile.torch_patches import inductor_compat
from cpcompile.torch_patches.inductor_compat import problems
from tests.cpu.attention_cases import AttentionCase
from tests.golden.capture import warnings
from tests.inductor.inductor_code import check_rings_are_operators, codes_of


@pytest.fixture(autouse=True)
def fresh():
    """Nothing is known of this torch, before and after."""
    for each in (problems, ring_problem):
        each.cache_clear()
    yield
    ring_problem.cache_clear()


def no_such_attribute(make, after):
    """`ordered` as it was written for an Inductor that has other attributes."""
    inductor_compat.graph().dependencies_of_another_version.add(after)
    return make()


def without_order(make, after):
    """`ordered` where Inductor no longer takes the order from us."""
    return make()


def without_messages(op, tensors, *rest):
    """`start_collective` that copies instead of sending."""
    copy = inductor_compat.fallback(torch.ops.aten.clone.default)
    return [copy(x) for x in tensors]


def test_a_ring_is_unrolled():
    assert ring_problem("cpu") is None


@pytest.mark.parametrize(
    ("name", "broken", "text"),
    [
        (
            "ordered",
            no_such_attribute,
            "a tiny ring: LoweringException: AttributeError: 'GraphLowering' object "
            "has no attribute 'dependencies_of_another_version'",
        ),
        (
            "ordered",
            without_order,
            "a tiny ring: RingOverlapError: in the generated code the message with",
        ),
        ("start_collective", without_messages, "a tiny ring: "),
    ],
    ids=["attribute", "order", "messages"],
)
def test_what_is_broken_is_said(monkeypatch, name, broken, text):
    monkeypatch.setattr(inductor_compat, name, broken)
    problem = ring_problem("cpu")
    assert problem is not None and problem.startswith(text)
    assert "\n" not in problem


def test_a_broken_interface_leaves_rings_operators(monkeypatch, caplog):
    monkeypatch.setattr(inductor_compat, "ordered", no_such_attribute)
    check_rings_are_operators()
    (text,) = warnings(caplog)
    assert "what cpcompile uses of Inductor: a tiny ring: LoweringExc" in text
    assert "rings are not unrolled: correct, but messages" in text


def test_a_ring_is_tried_only_where_one_is_unrolled(monkeypatch):
    monkeypatch.setattr(inductor_compat, "ordered", no_such_attribute)
    codes_of(2, AttentionCase(seq=16), unroll=0)
    assert ring_problem.cache_info().currsize == 0
