"""A score_mod inlined into the step kernels, interpreted, against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from cpcompile.geometry.blocks import Block
from cpcompile.kernels.configs import Kernel
from cpcompile.kernels.constants import (
    DropoutConstants,
    RowLimits,
    ScoreModConstants,
    ScoreModifiers,
)
from cpcompile.kernels.score_functions import triton_functions
from cpcompile.ops.step.dropout import Dropout
from tests.kernels.step_cases import SMALL
from tests.kernels.test_template_steps import launches
from tests.support.attention_calls import attention
from tests.support.bounds import OPERAND_SCALE, assert_close
from tests.support.score_programs import packed, text_of, waved, whole

SCALE = 0.3
INDEX = torch.arange(2000) % 3


def bent(score, b, h, q_idx, kv_idx, table, ids):
    near = torch.where((q_idx - kv_idx) % 5 < 3, score.tanh(), score.abs() * 0.5)
    other = torch.sigmoid(score) / (1 + ids[kv_idx % 7]) - torch.exp(-score * score)
    return near + other + table[-1, h] * (b + 1)


def clamped(score, b, h, q_idx, kv_idx, table, ids):
    far = torch.logical_or(q_idx < kv_idx, q_idx - kv_idx > 30)
    damped = torch.rsqrt(1.0 + score**2) * (kv_idx - q_idx // 4).clamp(min=0, max=5)
    own = torch.relu(score) + table[b, ids[q_idx]] * (q_idx != kv_idx)
    return torch.where(far, score * 0.25, damped + own)


def curved(score, b, h, q_idx, kv_idx, table, ids):
    """Calls that torch itself writes with others, and gradients written in place."""
    bound = torch.maximum(score, table[b, h]).clamp(-1.5, 2.5)
    small = torch.log1p(0.01 * score**2) + torch.expm1(-0.1 * (q_idx - kv_idx).abs())
    gates = F.softplus(score) * F.elu(score) + F.leaky_relu(score) - F.gelu(score)
    steps = F.hardtanh(score, -0.5, 0.5) * (kv_idx % 3) ** 2
    other = bound + small + gates + steps + F.logsigmoid(score)
    return other.masked_fill(kv_idx % 11 == 5, -2.0)


MODS = {"waved": waved, "bent": bent, "clamped": clamped, "curved": curved}


def captured(dtype):
    return [torch.linspace(-1, 1, 16, dtype=dtype).view(4, 4), INDEX]


def expected(name, dtype, operands, mask, at, factors):
    """out, lse, dq, dk and dv of all scores, and delta."""
    q, k, v, grad = (x.to(dtype).requires_grad_() for x in operands)
    wide = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
    b, h = (torch.arange(n) for n in q.shape[:2])
    index = (b[:, None, None, None], h[:, None, None], at[0][:, None], at[1])
    scores = MODS[name](q @ wide[0].mT * SCALE, *index, *captured(dtype))
    scores = scores.masked_fill(~mask, -torch.inf)
    out = (scores.softmax(-1) * factors) @ wide[1]
    grads = torch.autograd.grad(out, (q, k, v), grad)
    delta = (grad * out).sum(-1)
    found = (out, scores.logsumexp(-1), *grads, delta)
    return [x.detach() for x in found]


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("name", MODS)
def test_every_kernel(interpreter, name, dropped):
    """Of tokens in two spans, under causal limits by position."""
    torch.manual_seed(0)
    B, H, R, K = 2, 4, 50, 45
    operands = [torch.randn(B, n, m, 16) for n, m in ((H, R), (2, K), (2, K), (H, R))]
    operands[0] *= 0.5  # squares of scores multiply their errors
    rows, keys = (
        start + torch.arange(n) + 900 * (torch.arange(n) >= n // 2)
        for start, n in ((20, R), (11, K))
    )
    mask = keys <= rows[:, None]
    upper = mask.sum(-1).int()
    dropping, factors = None, torch.ones(())
    if dropped:
        seeds = torch.randint(2**31, (B, H))
        vectors = (x.int() for x in (seeds, rows, keys))
        dropping = DropoutConstants(2**29, 0.75, *vectors)
        dropout = [
            factors_of(seeds, rows, first, count)
            for first, count in (
                (int(keys[0]), K // 2),
                (int(keys[K // 2]), K - K // 2),
            )
        ]
        factors = torch.cat(dropout, -1)
    text = text_of(MODS[name], captured(torch.float32), operands[0], None)
    functions = triton_functions(text)
    assert functions is not None
    values = packed(captured(torch.float32), operands[0])[0, 0]
    scoring = ScoreModConstants(
        functions, values, rows.int(), keys.int(), torch.arange(B).int()
    )
    more = {"changes": ScoreModifiers(0.0, dropping, None, scoring), "config": SMALL}
    at = (rows, keys)
    exact, rough = (
        expected(name, dtype, operands, mask, at, factors.to(dtype))
        for dtype in (torch.float64, torch.float32)
    )
    q, k, v, grad = operands
    # Kernels read lse and delta in float32.
    rest = (RowLimits(upper=upper), SCALE, False)
    out, lse = interpreter("forward", q, k, v, None, None, *rest, **more)
    saved = (grad, q, k, v, exact[1].float(), exact[-1].float())
    (dk, dv), (dq,) = (
        interpreter("gradients", kernel, *saved, [], *rest, **more)
        for kernel in (Kernel.DKDV, Kernel.DQ)
    )
    names = ("out", "lse", "dq", "dk", "dv")
    for each, got, x, y in zip(
        names, (out, lse, dq, dk, dv), exact, rough, strict=False
    ):
        assert_close(each, got, x, y, 4 * OPERAND_SCALE)


def factors_of(seeds, rows, first, count):
    part = Block(0, len(rows), 0, count, position=first, masked=True)
    return Dropout(0.25, seeds, rows).factors(part, torch.float64)


def run_ring(strategy: str, learned: bool) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """This rank's part of causal attention, its gradients, and the launches."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    group, rank, ranks = mesh.get_group().group_name, mesh.get_rank(), mesh.size()
    q, k, v, grad = whole_operands()
    own = [x.chunk(ranks, 2)[rank].clone().requires_grad_() for x in (q, k, v)]
    table, ids = captured(torch.float32)
    values = packed([table.requires_grad_(learned), ids], q)
    text = text_of(waved, [table, ids], q)
    ranges = torch.stack([torch.arange(30) * 0, torch.arange(30) + 1], -1)[None]
    rest = (30, 30, False, SCALE, group)
    with launches("forward", "gradients") as (f, b):
        given = {"score_mod": text, "bias": values, "key_ranges": ranges}
        out, _ = attention(strategy)(*own, *rest, **given)
        grads = torch.autograd.grad(out, own, grad.chunk(ranks, 2)[rank])
    found = dict(zip(("q", "k", "v"), grads, strict=True)) | {"out": out.detach()}
    return found, (f.call_count, b.call_count // 2)  # dk and dv, and dq


def whole_operands() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, 30, 16) for n in (4, 2, 2, 4)]


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_of_two_ranks(interpreters, strategy, learned):
    """Captured numbers that are learned have a gradient, which is for products."""
    results = interpreters[2].run(run_ring, strategy, learned, timeout=170.0)
    exact, rough = {}, {}
    for dtype, found in ((torch.float64, exact), (torch.float32, rough)):
        q, k, v, grad = (x.to(dtype).requires_grad_() for x in whole_operands())
        out, _ = whole(q, k, v, SCALE, captured(dtype))
        grads = torch.autograd.grad(out, (q, k, v), grad)
        found |= dict(zip(("q", "k", "v"), grads, strict=True), out=out.detach())
    for name, x in exact.items():
        got = torch.cat([found[name] for found, _ in results], 2)
        assert_close(name, got, x, rough[name], OPERAND_SCALE)
    for _, (forward, backward) in results:
        assert forward > 0
        assert backward == (0 if learned else forward)


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, *_: score.erfinv(),
        lambda score, *_: score.cumsum(-1),
        lambda score, *_: score.double().exp(),
    ],
    ids=["no expression", "not pointwise", "float64"],
)
def test_what_has_no_functions(score_mod):
    text = text_of(score_mod, [], torch.randn(1, 2, 5, 8), None)
    assert text is None or triton_functions(text) is None
