"""What repeats, where blocks begin, and over which calls no kernel reaches."""

import random

import pytest
import torch
import torch.fx as fx

import cpcompile.ops  # noqa: F401  # registers its operators
from cpcompile.passes.local.folding.borders import best_offset, is_opaque
from cpcompile.passes.local.folding.repeats import RepeatedRun, repeats

aten = torch.ops.aten
TO = torch.ops.prims.convert_element_type.default
SHORT, LONG = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("target", "opaque"),
    [
        (aten.mm.default, True),
        (aten.addmm.default, True),
        (aten.convolution.default, True),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, True),
        (aten.sort.default, True),
        (aten.sort.stable, True),
        (aten._fft_r2c.default, True),
        (torch.ops.cp.attention_step.default, True),
        (torch.ops.cp.ring_shift.default, True),
        (torch.ops._c10d_functional.all_reduce.default, True),
        # Names with a part of a name of the others.
        (TO, False),
        (aten.linalg_vector_norm.default, False),
        (aten.add.Tensor, False),
    ],
)
def test_what_inductor_writes_no_kernel_for(target, opaque):
    node = fx.Graph().call_function(target, ())
    assert is_opaque(node) is opaque


def test_a_cast_is_no_border():
    """Inductor fuses casts: a border in front of one would cost a kernel."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = []
    for _ in range(3):
        for target, dtype in (
            (aten.relu.default, LONG),
            (TO, SHORT),
            (aten.sin.default, SHORT),
            (TO, LONG),
            (aten.mm.default, LONG),
        ):
            x = graph.call_function(target, (x,))
            x.meta["val"] = torch.empty(4, 4, dtype=dtype, device="meta")
            calls.append(x)
    offset = best_offset(calls, RepeatedRun(start=0, length=14, period=5))
    assert calls[offset].target in (aten.relu.default, aten.mm.default)


def test_planted_ones():
    draw = random.Random(0)
    for _ in range(200):
        period, count = draw.randint(2, 9), draw.randint(3, 6)
        block = [draw.randint(0, 99) for _ in range(period)]
        edges = [
            [draw.randint(100, 999) for _ in range(draw.randint(0, 9))] for _ in "ab"
        ]
        found = repeats([*edges[0], *block * count, *edges[1]], 3, 2)[0]
        assert (found.start, found.length) == (len(edges[0]), count * period)
        assert period % found.period == 0
    assert repeats("xabcabcabcaby", 3, 2)[0] == RepeatedRun(1, 11, 3)  # with a part
    assert repeats("xabcabcy", 3, 2) == repeats("aaaaaa", 3, 3) == []  # too few
