"""Values that are reduced over the tokens of all ranks, and what is done to them next.

Sums may wait until a call needs them, and with gradients they wait less: every call is
compared with one process with gradients and without.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu.on_ranks import on_ranks
from tests.support.small_calls import SmallCall, check_calls

REDUCED = {
    "mean": lambda x: x.mean(1),
    "sum": lambda x: x.sum(1),
    "amax": lambda x: x.amax(1),
    "var": lambda x: x.var(1),
    "norm": lambda x: x.norm(dim=1),
    "pool": lambda x: F.adaptive_avg_pool2d(x.mT.unsqueeze(-1), 1).flatten(1),
    "logsumexp": lambda x: x.logsumexp(1),
}


def filled(shape: tuple[int, ...]) -> Tensor:
    """Weights that are the same on every rank."""
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count, dtype=torch.float64).sin().view(shape)


BIAS, MATRIX = filled((8,)), filled((8, 8))
CONVOLUTIONS = {
    "conv1d": lambda y: F.conv1d(y.unsqueeze(-1), filled((6, 8, 1)), BIAS[:6]),
    "conv1d without a bias": lambda y: F.conv1d(y.unsqueeze(-1), filled((6, 8, 1))),
    "conv2d": lambda y: F.conv2d(y[:, :, None, None], filled((6, 8, 1, 1)), BIAS[:6]),
    "same": lambda y: F.conv1d(
        y.unsqueeze(-1), filled((6, 8, 1)), BIAS[:6], padding="same"
    ),
    "transposed": lambda y: F.conv_transpose1d(
        y.unsqueeze(-1), filled((8, 6, 1)), BIAS[:6]
    ),
}
OTHERS = {
    "plus": lambda y: y + 1,
    "minus": lambda y: 1 - y,
    "pointwise": lambda y: F.silu(y) + y.abs() + y.clamp(-0.1, 0.1) + y.exp(),
    "linear": lambda y: F.linear(y, MATRIX, BIAS),
    "bilinear": lambda y: F.bilinear(y, y, filled((3, 8, 8)), BIAS[:3]),
    "layer_norm": lambda y: F.layer_norm(y, (8,), BIAS, BIAS),
    "group_norm": lambda y: F.group_norm(y.unsqueeze(-1), 2, BIAS, BIAS),
    "softmax": lambda y: y.softmax(-1),
    "pad": lambda y: F.pad(y, (1, 1), value=3.0),
    "cat": lambda y: torch.cat([y, BIAS.expand(2, 8), y + 1], -1),
    "where": lambda y: torch.where(y > 0, y, BIAS),
    "in place": lambda y: y.clone().add_(1).mul_(y),
    "cross_entropy": lambda y: F.cross_entropy(y, torch.tensor([1, 2])),
}


KINDS = {"convolutions": CONVOLUTIONS, "others": OTHERS}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduced", REDUCED)
@on_ranks(2, timeout=280)
def test_what_reads_them_equals_one_process(reduced, kind):
    reduce = REDUCED[reduced]
    cases = {
        name: SmallCall(
            lambda x, call=call: call(reduce(x)), (2, 6, 8), without_gradients=True
        )
        for name, call in KINDS[kind].items()
    }
    check_calls(cases, 2)
