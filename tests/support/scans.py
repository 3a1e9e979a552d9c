"""Modules with torch's scans, steps of which keep channels or only rows apart."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._higher_order_ops.associative_scan import (
    associative_scan_op,
    generic_associative_scan,
)
from torch._higher_order_ops.scan import scan

from tests.support.mixers import Mixer


class Recurrence(Mixer):
    """A gated recurrence from zero; channels keep apart."""

    def mix(self, q, k, v):
        def step(carry, xs):
            gate, x = xs
            carry = gate * carry + x
            return carry, carry * 2

        _, y = scan(step, k.new_zeros(k.shape[0], k.shape[2]), (q.sigmoid(), k), dim=1)
        return y + v


class LearntStart(Mixer):
    """Backwards in time, from a state that is learnt; a step reads a weight."""

    def __init__(self, width=32):
        super().__init__(width)
        self.first = nn.Parameter(torch.randn(width))
        self.decay = nn.Parameter(torch.rand(width))

    def mix(self, q, k, v):
        def step(carry, x):
            carry = torch.tanh(x + carry * self.decay)
            return carry, carry.clone()

        first = self.first.expand(k.shape[0], -1).clone()
        last, y = scan(step, first, k, dim=1, reverse=True)
        return q * y + v * last.unsqueeze(1)


class Elman(Mixer):
    """A step multiplies its state by a matrix: only rows of a batch keep apart."""

    def __init__(self, width=32):
        super().__init__(width)
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def mix(self, q, k, v):
        def step(carry, x):
            carry = torch.tanh(x + carry @ self.weight)
            return carry, carry.clone()

        _, y = scan(step, k.new_zeros(k.shape[0], k.shape[2]), k, dim=1)
        return q * y + v


class Associative(Mixer):
    """The operator of associative_scan on a GPU, whose gradient in torch is wrong."""

    def mix(self, q, k, v):
        def combine(gate, x, next_gate, next_x):
            return [gate * next_gate, next_gate * x + next_x]

        # In memory as it is scanned, where torch's fake tensors say that results are.
        operands = [y.movedim(1, 0).contiguous() for y in (q.sigmoid(), k)]
        if torch.compiler.is_compiling():
            _, y = associative_scan_op(combine, operands, ())
        else:
            _, y = generic_associative_scan(combine, operands)
        return y.movedim(0, 1) + v


class HeadNorm(Mixer):
    """A step makes four heads, of however many channels it is given."""

    def mix(self, q, k, v):
        def step(carry, x):
            carry = (carry * 0.5 + x).unflatten(-1, (4, -1))
            carry = F.normalize(carry, dim=-1).flatten(1)
            return carry, carry.clone()

        k = k.unflatten(-1, (4, -1)).cumsum(1).flatten(2)
        _, y = scan(step, k.new_zeros(k.shape[0], k.shape[2]), k, dim=1)
        return q * y + v * k


SCANS = {x.__name__: x for x in (Recurrence, LearntStart, Elman, Associative, HeadNorm)}
