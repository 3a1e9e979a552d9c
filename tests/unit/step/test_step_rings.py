"""Steps over all chunks of all ranks are one attention, forward and backward.

A ring without a network: every rank's steps run here, one rank after the other, in the
order in which the chunks would arrive. References and tolerances are those of
Note [Derived tolerances].
"""

import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cpcompile.ops  # noqa: F401  registers the operators
from cpcompile.geometry.layout import Chunks, Layout
from cpcompile.geometry.visibility import visible_chunk, visible_tokens
from cpcompile.ops.step.block_attention import row_dots
from cpcompile.ops.step.row_mask import RowMask
from cpcompile.ops.step.step_arguments import StepChunk
from tests.cpu.attention_cases import Attended, AttentionCase, check, make_inputs
from tests.support.pairwise import in_pairs, selected_cases

KERNELS = ("aten_flash", "aten_math")
FORMS = ("split", "joint")
PADDING = 100.0  # what padded keys and values are filled with; nobody may see it

step = torch.ops.cp.attention_step
step_backward = torch.ops.cp.attention_step_backward


class Place:
    """Which tokens the ranks of a case hold, and what they see of each other's."""

    def __init__(self, case):
        keys = case.seq if case.kv_seq is None else case.kv_seq
        self.case, self.tokens = case, case.token_layout(case.seq)
        self.queries, self.keys = (Chunks(n, case.world) for n in (case.seq, keys))
        self.in_layout = case.causal and keys == case.seq

    def rows(self, rank):
        if self.in_layout:
            return self.tokens.positions(rank)
        return torch.arange(self.queries.count(rank)) + self.queries.start(rank)

    def held(self, source):
        if self.in_layout:
            return self.tokens.positions(source)
        return torch.arange(self.keys.count(source)) + self.keys.start(source)

    def told(self, rank, source):
        """What a step is told of the chunk of a source, which is padded."""
        scale = self.case.head_dim**-0.5
        if self.in_layout:
            visible = visible_tokens(self.tokens, rank, source)
            return StepChunk.plain(scale, visible).arguments()
        rows, keys = (
            (x.start(at), x.count(at))
            for x, at in ((self.queries, rank), (self.keys, source))
        )
        visible = visible_chunk(*rows, *keys, self.keys.size, self.case.causal)
        return StepChunk.plain(scale, visible).arguments()

    def steps(self, rank, k, v):
        """Yield the tokens of a chunk, the chunk, what is told, and if it is last."""
        for number in range(self.case.world):
            source = (rank - number) % self.case.world
            at = self.held(source)
            pad = (0, 0, 0, self.keys.size - len(at))
            chunk = [
                torch.nn.functional.pad(x[:, :, at], pad, value=PADDING) for x in (k, v)
            ]
            yield at, chunk, self.told(rank, source), number + 1 == self.case.world


def check_ring(case, kernel, form):
    place, inputs = Place(case), make_inputs(case)
    q, k, v, grad = inputs
    accumulation = torch.float64 if case.dtype == torch.float64 else torch.float32
    out, dq = torch.empty_like(grad), torch.empty_like(q)
    dk, dv = (torch.zeros_like(x, dtype=accumulation) for x in (k, v))
    for rank in range(case.world):
        rows, state = place.rows(rank), (None, None)
        for _, chunk, told, last in place.steps(rank, k, v):
            state = step(q[:, :, rows], *chunk, *state, *told, last, kernel)
        out[:, :, rows], lse = state
        saved = (grad[:, :, rows], q[:, :, rows])
        given = state[0] if form == "joint" else row_dots(saved[0], state[0])
        sums = []
        for at, chunk, told, last in place.steps(rank, k, v):
            operands = (*saved, *chunk, lse, given)
            if form == "joint":
                *sums, own_dk, own_dv = step_backward(
                    *operands, sums, "all", *told, last, kernel
                )
                parts = (own_dk, own_dv)
            else:
                zeros = [torch.zeros_like(x, dtype=accumulation) for x in chunk]
                parts = step_backward(*operands, zeros, "dkdv", *told, False, kernel)
                sums = step_backward(*operands, sums, "dq", *told, last, kernel)
            for whole, part in zip((dk, dv), parts, strict=True):
                whole[:, :, at] += part[:, :, : len(at)]
                assert not part[:, :, len(at) :].any()
        (dq[:, :, rows],) = sums
    got = Attended(out, dq, dk.to(case.dtype), dv.to(case.dtype))
    check(inputs, case.causal, None, got)


AXES = {
    "kernel": KERNELS,
    "form": FORMS,
    "causal": (True, False),
    "dtype": (torch.float32, torch.bfloat16, torch.float64),
    "kv_heads": (4, 2, 1),
    "world": (1, 2, 3, 4),
    "seq": (64, 67, 5),
    "kv_seq": (None, 30, 90),
    "value_dim": (16, 9, 24),
}


@pytest.mark.parametrize(
    "values",
    selected_cases(AXES),
    ids=lambda values: "-".join(str(v).replace("torch.", "") for v in values.values()),
)
def test_forward_and_gradients(values):
    rest = {k: v for k, v in values.items() if k not in ("kernel", "form")}
    check_ring(AttentionCase(**rest), values["kernel"], values["form"])


@in_pairs(
    {
        "seq, world": [(24, 3), (21, 3), (22, 4), (10, 4), (3, 4), (70, 2), (5, 1)],
        "layout": tuple(Layout),
        "dtype": [torch.float32, torch.float64],
        "kernel": KERNELS,
        "form": FORMS,
    }
)
def test_every_layout(seq, world, layout, dtype, kernel, form):
    case = AttentionCase(seq=seq, world=world, layout=layout, dtype=dtype, kv_heads=2)
    check_ring(case, kernel, form)


@settings(deadline=None)
@given(
    st.sampled_from(KERNELS),
    st.sampled_from(FORMS),
    st.booleans(),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 6),
)
def test_any_lengths(kernel, form, causal, seq, kv_seq, ranks):
    """Also fewer tokens than ranks, which leaves the last ones without any."""
    case = AttentionCase(
        "ring", "operator", causal, 2, torch.float64, ranks, seq, kv_seq
    )
    check_ring(case, kernel, form)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("length", [24, 22])
def test_no_layout_needs_a_mask(layout, length, monkeypatch):
    """aten's kernels compute every step; nothing holds all scores."""

    def refuse(*_):
        raise AssertionError("a mask of all rows and keys")

    monkeypatch.setattr(RowMask, "of_block", refuse)
    case = AttentionCase(seq=length, world=4, layout=layout)
    check_ring(case, "aten_flash", "joint")


@pytest.mark.parametrize("layout", [Layout.ZIGZAG, Layout.FOLD])
def test_aten_gets_a_contiguous_lse(layout, monkeypatch):
    """Of half of the rows; its backward on CUDA reads it without its strides."""
    module = sys.modules["cpcompile.ops.step.aten_flash"]
    forward, backward = (
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    recorded = []

    def record(*args, **kwargs):
        recorded.append(args[5])
        return backward(*args, **kwargs)

    kernels = SimpleNamespace(
        _scaled_dot_product_flash_attention_for_cpu=forward,
        _scaled_dot_product_flash_attention_for_cpu_backward=record,
    )
    monkeypatch.setattr(module, "aten", kernels)
    case = AttentionCase(seq=24, world=2, layout=layout)
    check_ring(case, "aten_flash", "joint")
    assert any(lse.shape[2] < 12 for lse in recorded)
    assert all(lse.is_contiguous() for lse in recorded)
