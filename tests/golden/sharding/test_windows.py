"""Windows of tokens, by unfold: views inside of the ranks' parts, else gathered."""

import pytest
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
        captured.lines("unfold", "unflatten", "movedim"),
        """\
unflatten = .unflatten(cp_shard, -1, (4, -1))  # [2, 32, 4, 2] S(1)
q = .transpose(unflatten, 1, 2)  # [2, 4, 32, 2] S(2)
unflatten_2 = unflatten(flatten, 1, (16, 2))  # [2, 16, 2, 8] S(1)
movedim = movedim(unflatten_2, 2, -1)  # [2, 16, 8, 2] S(1)
mean = .mean(movedim, -1)  # [2, 16, 8] S(1)
unflatten_1 = .unflatten(mean, -1, (4, -1))  # [2, 16, 4, 2] S(1)
q_1 = .transpose(unflatten_1, 1, 2)  # [2, 4, 16, 2] S(2)""",
    )


@pytest.mark.parametrize(("size", "step"), [(2, 1), (8, 8)])
def test_other_windows_are_gathered(mesh, size, step):
    """They overlap, or are of two ranks."""
    captured = sharded(attended_windows(size, step), mesh, 2, 32, 8)
    assert "= cp_replicated(unfold, " in captured.text
