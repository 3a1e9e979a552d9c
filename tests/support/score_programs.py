"""score_mods as graphs, as texts for operators, and on all scores at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.ops.step.score_mod import index_of
from cpcompile.passes.model.patterns.score_programs import score_program, values_dtype


def waved(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any, ids: Any):
    """table: [4, H], of numbers that are learned; ids: [S], integers."""
    near = table[(q_idx - kv_idx).abs().clamp(max=3), h]
    return torch.sin(score) + near * score**2 + 0.1 * (ids[kv_idx] + b)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any):
    return q_idx >= kv_idx


def text_of(
    score_mod: Callable[..., Any],
    captured: list[Tensor],
    q: Tensor,
    mask_mod: Callable[..., Any] | None = causal,
) -> str | None:
    """The text of a function of so many captured tensors."""
    mask = None if mask_mod is None else fx.symbolic_trace(mask_mod)
    return score_program(fx.symbolic_trace(score_mod), mask, captured, [], q)


def packed(captured: list[Tensor], q: Tensor) -> Tensor:
    """What operators are given of captured tensors; differentiable."""
    dtype = values_dtype(captured, q)
    return torch.cat([x.reshape(-1).to(dtype) for x in captured]).view(1, 1, -1)


def whole(
    q: Tensor, k: Tensor, v: Tensor, scale: float, captured: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Causal attention with `waved`, of all scores at once: out and log-sum-exp."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    index = index_of(scores, torch.arange(q.shape[2]), 0)
    scores = waved(scores, *index, *captured)
    scores = scores.masked_fill(~causal(*index), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)
