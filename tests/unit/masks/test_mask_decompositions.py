"""Calls that have a decomposition of their own in programs of masks."""

import pytest
import torch
import torch.nn.functional as F

from cpcompile.passes.model.masks.analysis.decompositions import _padded

PADS = [
    *((0, 0), (2, 1), (-1, 2), (2, -3), (-1, -2), (-6, 0), (-7, 2)),
    *((1, 0, 0, 2), (0, 0, -1, -1), (0, 0, 0, 0, 1, 1)),
]


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("value", [0.0, -torch.inf])
def test_a_pad_is_that_of_torch(pad, value):
    for x, by in ((torch.randn(3, 5, 7), pad), (torch.zeros(2, 0), (1, 2))):
        assert torch.equal(_padded(x, by, value), F.pad(x, by, value=value))
