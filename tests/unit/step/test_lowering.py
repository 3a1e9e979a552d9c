"""Which steps Inductor lowers through a template, and what it reads of them."""

import pytest

from cpcompile.geometry.visibility import Visible
from cpcompile.kernels.constants import RowLimits
from cpcompile.ops.step.lowering import _Step
from cpcompile.ops.step.step_arguments import StepChunk

CAUSAL = Visible(upper=(1, 1))


def test_a_step_by_a_template():
    arguments = StepChunk.plain(0.5, CAUSAL).arguments()
    step = _Step.read(*arguments, True, "triton", "a message")
    assert step == _Step(RowLimits(CAUSAL), 0.5, True, "a message")


def test_a_vector_is_a_node():
    step = _Step.read([], [], "a node", [], [], "scale=0.5", False, "triton")
    assert step == _Step(RowLimits(upper="a node"), 0.5, False, None)


@pytest.mark.parametrize(
    ("spec", "kernel"),
    [
        ("scale=0.5", "aten_flash"),
        ("scale=0.5", "aten_math"),
        ("scale=0.5 +bias", "triton"),
        ("scale=0.5 +key_ranges", "triton"),
        ("scale=0.5 softcap=1.0", "triton"),
    ],
)
def test_others_are_left_to_the_operator(spec, kernel):
    assert _Step.read([], [], None, [], [], spec, False, kernel) is None
