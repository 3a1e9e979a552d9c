"""Unrolled rings in balanced layouts: limits are integers, and every rank computes."""

import copy
import itertools
import re

import pytest
import torch

from cpcompile.kernels import choice
from cpcompile.ops.comm.ring_exchange import NOTHING_TO_HIDE_IT
from tests.golden.capture import fake_group
from tests.golden.golden_text import assert_golden, lines_with
from tests.golden.ring_graphs import expand, kept_graphs, name_operands, text
from tests.support.attention_calls import rest

RANKS = 4
_KEY_RANGE = re.compile(r"(?:rows|keys|upper|lower)=\[.*?\], ")


def traced(rank, layout, tokens=8):
    """Forward and backward of the operator on `tokens` of this rank's tokens."""
    given = rest(RANKS * tokens, RANKS * tokens, True, 0.5, "0", layout=layout)

    def attend(q, k, v):
        return torch.ops.cp.ring_attention(q, k, v, *given)[0]

    with fake_group(rank, RANKS), kept_graphs() as (graphs, compiler):
        qkv = torch.randn(3, 1, 2, tokens, 4).unbind()
        step = torch.compile(attend, backend=compiler, fullgraph=True)
        step(*(x.requires_grad_() for x in qkv)).sum().backward()
    for graph in graphs:
        name_operands(graph)
    return graphs


def unrolled(graph, rank, kernel="auto"):
    assert expand(graph, rank, RANKS, kernel=kernel) == 1
    return text(graph)


def key_ranges_of(code):
    steps = lines_with(code, "= cp.attention_step").splitlines()
    ranges = ("".join(_KEY_RANGE.findall(x)).removesuffix(", ") for x in steps)
    return "; ".join(x or "all" for x in ranges)


def test_limits():
    """rows, keys, upper and lower of the steps of a rank, and those of the backward.

    In zigzag all queries of rank 1 see the first four of eight keys of rank 0, and the
    last four see all keys of ranks 3 and 2.
    """
    limits = {}
    for layout, rank in (("zigzag", 1), ("zigzag", 3), ("striped", 1), ("fold", 1)):
        forward, backward = (
            key_ranges_of(unrolled(x, rank)) for x in traced(rank, layout)
        )
        assert forward == backward
        limits[f"{layout} on rank {rank}"] = forward
    assert_golden(
        "\n".join(f"{place}: {text}" for place, text in limits.items()),
        """\
zigzag on rank 1: upper=[1, 1]; keys=[0, 4]; rows=[4, 8]; rows=[4, 8]
zigzag on rank 3: upper=[1, 1]; keys=[0, 4]; keys=[0, 4]; keys=[0, 4]
striped on rank 1: upper=[1, 1]; upper=[1, 1]; upper=[0, 0]; upper=[0, 0]
fold on rank 1: upper=[1, 1]; upper=[1, 0]; upper=[0, 1]; upper=[0, 1]""",
    )


@pytest.mark.parametrize("layout", ["zigzag", "striped", "fold"])
def test_every_rank_has_the_same_calls(monkeypatch, layout):
    """But for the limits of the steps; only the last message is behind no step."""
    monkeypatch.setattr(choice, "_has_triton", lambda: True)
    graphs = [traced(rank, layout) for rank in range(RANKS)]
    for direction, kernel in itertools.product((0, 1), ("aten_flash", "triton")):
        found = [
            unrolled(copy.deepcopy(of_rank[direction]), rank, kernel)
            for rank, of_rank in enumerate(graphs)
        ]
        assert len({_KEY_RANGE.sub("", x) for x in found}) == 1
        shifts = lines_with(found[0], "= cp.ring_shift").splitlines()
        behind_no_step = [NOTHING_TO_HIDE_IT in line for line in shifts]
        alone = direction == 1 and kernel == "aten_flash"  # dk, dv on their way home
        assert behind_no_step == [False] * (len(shifts) - 1) + [alone]
