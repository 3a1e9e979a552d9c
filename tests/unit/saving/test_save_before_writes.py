"""The backward has what the forward read of a buffer, also after it was written."""

import copy

import pytest
import torch
import torch.nn as nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition

from cpcompile.passes.joint.save_before_writes import save_before_writes

SIZE = 4


def mean(y, buffer):
    with torch.no_grad():
        buffer.mul_(0.9).add_(y.abs().mean(0), alpha=0.1)
    return (y / buffer).square()


def by_lerp(y, buffer):
    with torch.no_grad():
        buffer.lerp_(y.detach().abs().mean(0), 0.1)
    return (y / buffer).square()


def counted(y, buffer):
    buffer += 1
    return y.square() / buffer


def part(y, buffer):
    first = buffer.view(2, 2)[0]
    scale = first.exp().sum()
    buffer.add_(1)
    return y * scale


def largest(y, buffer):
    values, _ = buffer.max(0)
    buffer.add_(1)
    return y * values.square()


FORWARDS = {f.__name__: f for f in (mean, by_lerp, counted, part, largest)}


class Buffered(nn.Module):
    """What is computed of a linear layer and of a buffer that it writes."""

    buffer: torch.Tensor

    def __init__(self, name):
        super().__init__()
        self.linear, self.name = nn.Linear(SIZE, SIZE), name
        self.register_buffer("buffer", torch.linspace(1, 2, SIZE))

    def forward(self, x):
        return FORWARDS[self.name](self.linear(x), self.buffer).sum()


def step(call, model, x):
    for _ in "12":
        call(x).backward()
    return [model.linear.weight.grad, model.linear.bias.grad, model.buffer]


def compiled(model):
    """The model by aot_eager with the pass, and how many values it saved."""
    counts = []

    def partition(joint, *args, **kwargs):
        counts.append(save_before_writes(joint.graph, None))
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    return torch.compile(model, backend=backend), counts


@pytest.mark.parametrize("name", FORWARDS)
def test_gradients_are_those_of_eager(name):
    torch.manual_seed(0)
    model, x = Buffered(name), torch.randn(3, SIZE)
    other = copy.deepcopy(model)
    call, counts = compiled(other)
    for got, wanted in zip(step(call, other, x), step(model, model, x), strict=True):
        torch.testing.assert_close(got, wanted)
    assert counts[0] > 0


def test_what_the_backward_does_not_need_is_not_saved():
    class Watched(Buffered):
        def forward(self, x):
            y = self.linear(x)
            with torch.no_grad():
                self.buffer.lerp_(y.mean(0), 0.1)
            return y.square().sum()

    model = Watched("")
    call, counts = compiled(model)
    step(call, model, torch.randn(3, SIZE))
    assert counts == [0]
