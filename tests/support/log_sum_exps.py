"""Attention whose log-sum-exp is read: by an operator, and of all scores at once."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.attention_calls import attention, groups_of
from tests.unit.ops.operands import make_operands

LENGTH, SCALE, CAP = 6, 0.3, 2.0
KEY_RANGES = torch.tensor([[0, 0], [0, 2], [1, 3], [0, 6], [2, 6], [3, 5]])
KINDS = ("causal", "key_ranges", "softcap", "bias", "sinks")


def given_of(kind: str, dtype: torch.dtype) -> dict[str, Tensor | float]:
    ranges = {} if kind == "causal" else {"key_ranges": KEY_RANGES[None]}
    bias = torch.linspace(-1, 1, 4 * LENGTH**2, dtype=dtype)
    others = {
        "softcap": {"softcap": CAP},
        "bias": {"bias": bias.view(1, 4, LENGTH, LENGTH).requires_grad_()},
        "sinks": {"sinks": torch.linspace(-1, 1, 4, dtype=dtype).requires_grad_()},
    }
    return ranges | others.get(kind, {})


def attend(strategy: str, kind: str, group: str, q, k, v, given):
    if strategy == "local":
        return attention(strategy)(q, k, v, SCALE, **given)
    groups = groups_of(strategy, group)
    rest = (LENGTH, LENGTH, kind == "causal", SCALE, *groups)
    return attention(strategy)(q, k, v, *rest, wants_lse=True, **given)


def whole(kind: str, q, k, v, given) -> tuple[Tensor, Tensor]:
    """The same of all scores, but for row 0 of the ranges."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * SCALE
    if "softcap" in given:
        scores = CAP * torch.tanh(scores / CAP)
    if "bias" in given:
        scores = scores + given["bias"]
    key = torch.arange(LENGTH)
    first, last = KEY_RANGES.unbind(-1)
    visible = (key >= first[:, None]) & (key < last[:, None])
    visible[0] = True  # it sees none, so that torch has no gradient; nothing reads it
    if kind == "causal":
        visible = key <= key[:, None]
    scores = scores.masked_fill(~visible, float("-inf"))
    if "sinks" in given:
        column = given["sinks"][:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp()[..., :LENGTH] @ v, lse


def step_of_lse(kind: str, dtype: torch.dtype, call) -> dict[str, Tensor]:
    """Results of rows that see keys, and gradients of what reads both."""
    q, k, v = (x.to(dtype).requires_grad_() for x in make_operands(torch.float64, 2))
    given = given_of(kind, dtype)
    out, lse = call(q, k, v, given)
    first = int(kind != "causal")  # row 0 sees no key
    out, lse = out[:, :, first:], lse[:, :, first:]
    (out.to(lse.dtype).sin().sum(-1) * lse.sigmoid()).sum().backward()
    leaves = {"q": q, "k": k, "v": v} | given
    found = {f"grad of {n}": x.grad for n, x in leaves.items() if _has_gradient(x)}
    return found | {"out": out.detach(), "lse": lse.detach()}


def _has_gradient(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
