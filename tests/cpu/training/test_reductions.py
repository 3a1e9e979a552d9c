"""Reductions over a sharded sequence, and other calls whose rules are hard."""

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.on_ranks import on_ranks
from tests.cpu.programs import Base, run_program
from tests.support.bounds import check


def norms(x):
    found = [x.norm(dim=1).sum(), -x.norm(p=3, dim=-2).sum(), 1 + x.norm()]
    for order in (0, 1, 3.5, -2, float("inf"), float("-inf")):
        found.append(torch.linalg.vector_norm(x, ord=order, dim=1).square().mean())
    found.append(F.normalize(x, dim=1).pow(3).sum() + torch.linalg.norm(x[0]))
    found.append((x / x.norm(dim=1, keepdim=True)).pow(3).sum())
    return sum(found)


def flags(x):
    some, every = (x > 0.3).any(1), (x > -1).all(1)
    found = [some.sum(), some.float().mean(), every.sum(), (x > 0).any() * 2.0]
    found += [(x > 0.2).any((0, 1)).sum(), (~some).sum(), (~every).float().sum()]
    return x.mean() * sum(found)


def places(x):
    # Equal tokens have equal rows, and rounding would decide which is the largest.
    x = x + torch.linspace(0, 1, x.shape[1]).unsqueeze(-1)
    found = [x.argmax(1), x.argmin(-2), x.argmax(1, keepdim=True), x.argmax(-1)]
    found += [x.max(1)[1], x.min(-2, keepdim=True)[1], x.topk(3, 1)[1], x.argmin()]
    first = x[torch.arange(x.shape[0]), x[..., 0].argmax(1)].square().mean()
    return first + x.mean() * sum(n.float().cos().mean() for n in found)


def deviations(x):
    found = (x / x.std(1, keepdim=True)).sum() + x.var((0, 1)).sum() + x.std()
    variance, mean = torch.var_mean(x, 1)
    centred = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1).sqrt()
    return found + (variance * mean).sum() + centred.pow(3).mean()


REDUCTIONS = {f.__name__: f for f in (norms, flags, places, deviations)}


class Reduced(Base):
    def __init__(self, name):
        super().__init__()
        self.reduce = REDUCTIONS[name]

    def after(self, x):
        return self.reduce(x)


PLAIN = [(16, 2, "zigzag"), (16, 2, "contiguous"), (17, 3, "auto")]
DISTRIBUTED = [(16, 2, "auto"), (17, 3, "contiguous")]
# Dynamo itself may fail to add an integer to a sum that waits: it depends on what
# DTensor remembers of other programs.
CASES = [
    *((name, "plain", *each) for name in REDUCTIONS for each in PLAIN),
    *((x, "dtensor", *y) for x in REDUCTIONS if x != "flags" for y in DISTRIBUTED),
]


@pytest.mark.parametrize(("name", "door", "seq", "world", "layout"), CASES)
@on_ranks("world")
def test_a_reduction_equals_one_process(name, door, seq, world, layout):
    found, rewritten = run_program(lambda: Reduced(name), seq, world, door, layout)
    check(found)
    assert rewritten == [1]
