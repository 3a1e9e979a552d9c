"""Have the policies of selective checkpoints keep our attention as torch's.

A policy names the operators whose results are kept, and knows none of ours: attention,
with its messages, would run again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from cpcompile.ops.latent_steps import WHOLE

from ..graph.nodes import all_graphs

_CONTEXTS = "_checkpoint_context_fn"  # in a region's meta; seen in 2.13


def ask_policies(graph: fx.Graph) -> None:
    """Ask policies of torch's attention beside ours."""
    for region in all_graphs(graph):
        owner = region.owning_module
        contexts = None if owner is None else owner.meta.get(_CONTEXTS)
        if owner is not None and contexts is not None:
            owner.meta[_CONTEXTS] = _Contexts(contexts)


class _Contexts:
    """Contexts of a checkpoint whose policies are asked of torch's attention, too."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        if hasattr(make, "cache_hash"):  # torch keeps no program without one
            self.cache_hash = make.cache_hash

    def __call__(self) -> Any:
        modes = self.make()
        for mode in modes:
            policy = getattr(mode, "policy_fn", None)  # contexts may be of any class
            if policy is not None:
                mode.policy_fn = _Policy(policy)
        return modes


class _Policy:
    """A policy that keeps our attention if it would keep torch's."""

    def __init__(self, policy: Callable[..., Any]) -> None:
        self.policy = policy

    def __call__(self, ctx: Any, call: Any, *args: Any, **kwargs: Any) -> Any:
        answer = self.policy(ctx, call, *args, **kwargs)
        if getattr(call, "namespace", None) not in _OURS or answer not in _AGAIN:
            return answer
        if not call.__name__.partition(".")[0].endswith("attention"):
            return answer
        answers = (self.policy(ctx, x, *args[:3]) for x in _ATTENTION)
        return next((x for x in answers if x not in _AGAIN), answer)


_OURS = ("cp", WHOLE)
_AGAIN = (
    *(False, CheckpointPolicy.MUST_RECOMPUTE),
    CheckpointPolicy.PREFER_RECOMPUTE,
)
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_attention_math.default,
    torch.ops.higher_order.flex_attention,
)
