"""Windows of tokens, by unfold: views inside of the ranks' parts, or moved."""

import torch.nn.functional as F

from tests.golden.capture import sharded
from tests.golden.golden_text import assert_golden
from tests.golden.operands import attend


def attended_windows(size, step):
    return lambda x: attend(attend(x).unfold(1, size, step).mean(-1))


def test_windows_of_images_are_gathered(mesh):
    """torch.nn.functional has an unfold of its own, with other arguments."""
    captured = sharded(
        lambda x: attend(F.unfold(attend(x)[:, None], (1, 8)).mT), mesh, 2, 32, 8
    )
    assert "= cp_replicated(unfold, " in captured.text


def test_windows_inside_of_parts_are_views(mesh):
    captured = sharded(attended_windows(2, 2), mesh, 2, 32, 8)
    assert_golden(
        captured.lines("= unflatten", "movedim"),
        """\
unflatten_2 = unflatten(flatten, 1, (16, 2))  # [2, 16, 2, 8] S(1)
movedim = movedim(unflatten_2, 2, -1)  # [2, 16, 8, 2] S(1)
mean = .mean(movedim, -1)  # [2, 16, 8] S(1)""",
    )


def test_windows_that_overlap_are_moved(mesh):
    """test_strided_windows.py shows others."""
    captured = sharded(attended_windows(2, 1), mesh, 2, 32, 8)
    assert "= cp_replicated(" not in captured.text
    assert "'windows'" in captured.text


def test_windows_of_two_ranks_are_gathered(mesh):
    captured = sharded(attended_windows(8, 8), mesh, 2, 32, 8)
    assert "= cp_replicated(unfold, " in captured.text
