"""The operators that exchange messages when they run, in the order of the graph."""

from __future__ import annotations

import torch

import cpcompile.ops  # noqa: F401  (registers the operators)

# Not those that are made of others before they run, nor steps, which send nothing.
COMMUNICATING = frozenset(
    {
        torch.ops.cp.ring_attention.default,
        torch.ops.cp.ring_attention_backward.default,
        torch.ops.cp.all_gather_attention.default,
        torch.ops.cp.all_gather_attention_backward.default,
        torch.ops.cp.ulysses_scatter.default,
        torch.ops.cp.ulysses_gather.default,
        torch.ops.cp.relayout.default,
    }
)
