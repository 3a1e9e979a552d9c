"""Operators compute a score_mod part by part, with gradients of what it captures."""

import importlib

import pytest
import torch

from cpcompile.ops.step import row_mask, rows_under_mask
from tests.support.attention_calls import (
    attention,
    groups_of,
    rest,
    rest_of_local,
)
from tests.support.bounds import OPERAND_SCALE, assert_close
from tests.support.largest_value import Largest
from tests.support.score_programs import packed, text_of, waved, whole
from tests.unit.ops.operands import make_operands

LENGTH, SCALE = 13, 0.3
STRATEGIES = ("ring", "all_gather", "local", "ulysses", "hybrid")


def captured(dtype, length=LENGTH):
    table = torch.linspace(-1, 1, 16, dtype=dtype).view(4, 4).requires_grad_()
    return [table, torch.arange(length) % 3]


def attend(strategy, group, q, k, v, **given):
    call = attention(strategy)
    if strategy == "local":
        return call(q, k, v, SCALE, **given)
    sizes, groups = (q.shape[2], k.shape[2]), groups_of(strategy, group)
    return call(q, k, v, *sizes, False, SCALE, *groups, wants_lse=True, **given)


def step(dtype, call):
    """Results, and gradients of what reads both."""
    operands = make_operands(torch.float64, 2, LENGTH, LENGTH)
    q, k, v = (x.to(dtype).requires_grad_() for x in operands)
    own = captured(dtype)
    out, lse = call(q, k, v, own)
    (out.to(lse.dtype).sin().sum(-1) * lse.sigmoid()).sum().backward()
    leaves = {"q": q, "k": k, "v": v, "table": own[0]}
    found = {f"grad of {name}": x.grad for name, x in leaves.items()}
    return found | {"out": out.detach(), "lse": lse.detach()}


@pytest.mark.parametrize("elements", [64, 1 << 24])
@pytest.mark.parametrize("ranges", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_against_autograd(one_rank, monkeypatch, strategy, dtype, ranges, elements):
    """ranges: whether key ranges say besides what the function hides."""
    for module in (rows_under_mask, row_mask):
        monkeypatch.setattr(module, "MASK_ELEMENTS", elements)

    def parts(q, k, v, own):
        given = {"score_mod": text_of(waved, own, q), "bias": packed(own, q)}
        if ranges:
            row = torch.arange(LENGTH)
            given["key_ranges"] = torch.stack([row * 0, row + 1], -1)[None]
        return attend(strategy, one_rank, q, k, v, **given)

    got = step(dtype, parts)
    exact, rough = (
        step(kind, lambda q, k, v, own: whole(q, k, v, SCALE, own))
        for kind in (torch.float64, dtype)
    )
    for name, x in exact.items():
        floor = OPERAND_SCALE if name.startswith("grad") else 0.0
        other = None if dtype == torch.float64 else rough[name]
        assert_close(name, got[name], x, other, floor)


def test_of_few_queries(one_rank):
    """Every rank has all queries, as where a token is decoded."""
    q, k, v = make_operands(torch.float64, 2, LENGTH, LENGTH)
    own = captured(torch.float64)
    given = {"score_mod": text_of(waved, own, q), "bias": packed(own, q).detach()}
    got = attend("split_kv", one_rank, q, k, v, **given)
    for name, x, wanted in zip(
        ("out", "lse"), got, whole(q, k, v, SCALE, own), strict=True
    ):
        assert_close(name, x, wanted.detach())


def test_nothing_is_held_for_all_pairs(monkeypatch):
    tokens, elements = 512, 4096
    for module in (rows_under_mask, row_mask):
        monkeypatch.setattr(module, "MASK_ELEMENTS", elements)
    q = torch.randn(1, 4, tokens, 4)
    own = captured(torch.float32, tokens)
    given = {"score_mod": text_of(waved, own, q), "bias": packed(own, q).detach()}
    module = importlib.import_module("cpcompile.ops.strategies.ulysses_attention")
    forward = module.local_attention._init_fn
    backward = module.local_attention_backward._init_fn
    with Largest() as largest:
        extras, spec = rest_of_local(SCALE, **given)
        out, lse = forward(q, q, q, extras, spec)
        *_, grad = backward(q, q, q, q, out, lse, extras, spec, True, None)
    assert grad.shape == given["bias"].shape
    assert grad.any()
    assert largest.numel <= 2 * elements < 4 * tokens**2 / 32


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_opcheck(one_rank, strategy):
    operands = make_operands(torch.float32, 2)
    q, k, v = (x.requires_grad_() for x in operands)
    own = captured(torch.float32, 6)
    bias = packed(own, q).detach().requires_grad_()
    given = {"score_mod": text_of(waved, own, q), "bias": bias}
    others = rest_of_local(SCALE, **given)
    if strategy != "local":
        groups = groups_of(strategy, one_rank)
        others = rest(6, 6, False, SCALE, *groups, wants_lse=True, **given)
    forward = getattr(torch.ops.cp, f"{strategy}_attention").default
    torch.library.opcheck(forward, (q, k, v, *others))


@pytest.mark.parametrize(
    ("bias", "text"),
    [
        (None, "a score_mod without a bias, needed the values that it reads"),
        (torch.zeros(1, 4, 3), "bias (1, 4, 3), needed [1, 1, n] of a score_mod"),
    ],
)
def test_values_of_another_form(bias, text):
    q, k, v = make_operands(torch.float32, 2)
    with pytest.raises(ValueError) as caught:
        attend("local", "", q, k, v, score_mod="def forward(): pass", bias=bias)
    assert text in str(caught.value)


def test_no_text():
    """What a text would not say each time: random numbers, writes, constants."""

    def random(score, b, h, q_idx, kv_idx):
        return score + torch.rand_like(score)

    def written(score, b, h, q_idx, kv_idx):
        return score.mul_(2)

    q = torch.zeros(1, 4, 5, 8)
    for function in (random, written):
        assert text_of(function, [], q) is None
