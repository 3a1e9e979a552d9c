"""Unrolled rings in balanced layouts: limits are integers, and every rank computes."""
# ruff: noqa: E501  graphs as text have long lines

import copy
import itertools
import re

import pytest
import torch
from expecttest import assert_expected_inline
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from cpcompile.kernels import choice
from cpcompile.ops.comm.ring_exchange import NOTHING_TO_HIDE_IT
from tests.golden.capture import fake_group
from tests.golden.ring_graphs import expand, text

RANKS = 4


def traced(rank, layout, tokens=8):
    """Forward and backward of the operator on `tokens` of this rank's tokens."""
    graphs = []

    def keep(gm, _):
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def attend(q, k, v):
        length = RANKS * tokens
        rest = (length, length, True, 0.5, "0")
        return torch.ops.cp.ring_attention(q, k, v, *rest, layout=layout)[0]

    with fake_group(rank, RANKS):
        qkv = torch.randn(3, 1, 2, tokens, 4).unbind()
        compiler = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        step = torch.compile(attend, backend=compiler, fullgraph=True)
        step(*(x.requires_grad_() for x in qkv)).sum().backward()
    return graphs


def unrolled(graph, rank, kernel="auto"):
    assert expand(graph, rank, RANKS, kernel=kernel) == 1
    return text(graph)


def calls(code, *names):
    """The lines that call one of `names`."""
    lines = code.splitlines()
    return "\n".join(x for x in lines if any(f"cp.{name}(" in x for name in names))


def key_ranges_of(code):
    steps = calls(code, "attention_step", "attention_step_backward").splitlines()
    return "  ".join(re.search(r"((\[[\d, ]*\], ){4})0\.5", x)[1][:-2] for x in steps)


def test_forward_of_zigzag():
    """All queries see the first four of eight keys of rank 0, and the last four see all
    keys of ranks 3 and 2."""
    graph, _ = traced(1, "zigzag")
    assert "32, True, 0.5, '0', 1, None, None, 'zigzag')" in text(graph)
    assert_expected_inline(
        calls(unrolled(graph, 1), "attention_step", "ring_shift", "ring_wait"),
        """\
ring_shift = cp.ring_shift([primals_2, primals_3], '0', 'keys and values, step 0')
attention_step = cp.attention_step(primals_1, primals_2, primals_3, None, None, None, None, [], [], [1, 1], [], 0.5, False, 'aten_flash', ring_shift[0])
ring_wait = cp.ring_wait(ring_shift[0], attention_step[0], 'keys and values, step 0')
ring_wait_1 = cp.ring_wait(ring_shift[1], attention_step[0], 'keys and values, step 0')
ring_shift_1 = cp.ring_shift([ring_wait, ring_wait_1], '0', 'keys and values, step 1')
attention_step_1 = cp.attention_step(primals_1, ring_wait, ring_wait_1, attention_step[0], attention_step[1], None, None, [], [0, 4], [], [], 0.5, False, 'aten_flash', ring_shift_1[0])
ring_wait_2 = cp.ring_wait(ring_shift_1[0], attention_step_1[0], 'keys and values, step 1')
ring_wait_3 = cp.ring_wait(ring_shift_1[1], attention_step_1[0], 'keys and values, step 1')
ring_shift_2 = cp.ring_shift([ring_wait_2, ring_wait_3], '0', 'keys and values, step 2')
attention_step_2 = cp.attention_step(primals_1, ring_wait_2, ring_wait_3, attention_step_1[0], attention_step_1[1], None, None, [4, 8], [], [], [], 0.5, False, 'aten_flash', ring_shift_2[0])
ring_wait_4 = cp.ring_wait(ring_shift_2[0], attention_step_2[0], 'keys and values, step 2')
ring_wait_5 = cp.ring_wait(ring_shift_2[1], attention_step_2[0], 'keys and values, step 2')
attention_step_3 = cp.attention_step(primals_1, ring_wait_4, ring_wait_5, attention_step_2[0], attention_step_2[1], None, None, [4, 8], [], [], [], 0.5, True, 'aten_flash')""",
    )


def test_backward_of_zigzag():
    _, graph = traced(1, "zigzag")
    assert_expected_inline(
        calls(unrolled(graph, 1), "attention_step_backward", "ring_shift"),
        """\
ring_shift = cp.ring_shift([primals_2, primals_3], '0', 'keys and values, step 0')
attention_step_backward = cp.attention_step_backward(tangents_1, primals_1, primals_2, primals_3, detach_1, getitem_1, None, [], [], [1, 1], [], 0.5, False, 'aten_flash', ring_shift[0])
ring_shift_1 = cp.ring_shift([attention_step_backward[1], attention_step_backward[2]], '0', 'dk and dv, step 0')
ring_shift_2 = cp.ring_shift([ring_wait, ring_wait_1], '0', 'keys and values, step 1', ring_shift_1[0])
attention_step_backward_1 = cp.attention_step_backward(tangents_1, primals_1, ring_wait, ring_wait_1, detach_1, getitem_1, attention_step_backward[0], [], [0, 4], [], [], 0.5, False, 'aten_flash', ring_shift_2[0])
ring_shift_3 = cp.ring_shift([add, add_1], '0', 'dk and dv, step 1')
ring_shift_4 = cp.ring_shift([ring_wait_4, ring_wait_5], '0', 'keys and values, step 2', ring_shift_3[0])
attention_step_backward_2 = cp.attention_step_backward(tangents_1, primals_1, ring_wait_4, ring_wait_5, detach_1, getitem_1, attention_step_backward_1[0], [4, 8], [], [], [], 0.5, False, 'aten_flash', ring_shift_4[0])
ring_shift_5 = cp.ring_shift([add_2, add_3], '0', 'dk and dv, step 2')
attention_step_backward_3 = cp.attention_step_backward(tangents_1, primals_1, ring_wait_8, ring_wait_9, detach_1, getitem_1, attention_step_backward_2[0], [4, 8], [], [], [], 0.5, True, 'aten_flash', ring_shift_5[0])
ring_shift_6 = cp.ring_shift([add_4, add_5], '0', 'dk and dv, step 3, behind no step')""",
    )


def test_limits():
    """rows, keys, upper and lower of the steps of a rank, and those of the backward."""
    limits = {}
    for layout, rank in (("zigzag", 3), ("striped", 1), ("fold", 1)):
        forward, backward = (
            key_ranges_of(unrolled(x, rank)) for x in traced(rank, layout)
        )
        assert forward == backward
        limits[f"{layout} on rank {rank}"] = forward
    assert_expected_inline(
        "\n".join(f"{place}: {text}" for place, text in limits.items()),
        """\
zigzag on rank 3: [], [], [1, 1], []  [], [0, 4], [], []  [], [0, 4], [], []  [], [0, 4], [], []
striped on rank 1: [], [], [1, 1], []  [], [], [1, 1], []  [], [], [0, 0], []  [], [], [0, 0], []
fold on rank 1: [], [], [1, 1], []  [], [], [1, 0], []  [], [], [0, 1], []  [], [], [0, 1], []""",
    )


@pytest.mark.core("striped")
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
        assert len({re.sub(r"\[\d+, \d+\]|\[\]", "LIMIT", x) for x in found}) == 1
        shifts = calls(found[0], "ring_shift").splitlines()
        behind_no_step = [NOTHING_TO_HIDE_IT in line for line in shifts]
        alone = direction == 1 and kernel == "aten_flash"  # dk, dv on their way home
        assert behind_no_step == [False] * (len(shifts) - 1) + [alone]
