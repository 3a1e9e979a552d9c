"""Views that make windows of several sequences are written in two steps."""

import pytest
import torch

from tests.golden.capture import sharded
from tests.golden.golden_text import assert_golden, lines_with
from tests.support.grids import WIDTH, InOneStep


def test_windows_made_and_joined(mesh):
    torch.manual_seed(0)
    found = sharded(InOneStep(), mesh, 2, 54, WIDTH)
    step = found["split_window_views"]
    assert step.rewrites == 2 and found["find_windows"].rewrites == 1
    words = ("= .reshape(", "= unflatten(", "= flatten(", "= .view(")
    assert_golden(
        "\n  ->\n".join(lines_with(x, *words) for x in (step.before, step.after)),
        """\
reshape = .reshape(l_x_, -1, 6, 32)  # [18, 6, 32]
y_4 = .view(linear_1, (2, 54, 32))  # [2, 54, 32]
  ->
unflatten_6 = unflatten(l_x_, 1, (9, 6))  # [2, 9, 6, 32]
flatten_2 = flatten(unflatten_6, 0, 1)  # [18, 6, 32]
unflatten_7 = unflatten(linear_1, 0, (2, 9))  # [2, 9, 6, 32]
flatten_3 = flatten(unflatten_7, 1, 2)  # [2, 54, 32]""",
    )


TWINS = {
    "heads": lambda x: x.view(2, 54, 4, -1),
    "channels": lambda x: x.view(2, 108, -1),
    "single tokens": lambda x: x.view(108, 1, -1),
    "not of one sequence": lambda x: x.view(3, 36, -1),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_stays(mesh, name):
    found = sharded(lambda x: TWINS[name](x).sin(), mesh, 2, 54, WIDTH)
    assert found["split_window_views"].rewrites == 0
