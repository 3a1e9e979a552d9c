"""Read the calls of attention operators that insert_attention has written."""

from __future__ import annotations

import torch
import torch.fx as fx

import cpcompile.ops  # noqa: F401  (registers the operators)
from cpcompile.cost.plans import Strategy
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.ops.attention_spec import AttentionSpec
from cpcompile.torch_private.operators import OpOverload

from .calls import canonical_call
from .context import AttentionCall
from .nodes import fake_value

OPERATORS: dict[Strategy, OpOverload] = {
    strategy: getattr(torch.ops.cp, row.operator).default
    for strategy, row in STRATEGIES.items()
}
SPLIT_KV = OPERATORS[Strategy.SPLIT_KV]
CALL = "cp_attention_call"  # in a node's meta
PLAN = "cp_attention_plan"  # in what AOTAutograd keeps of it, "custom": its place


def is_cp_attention(node: fx.Node) -> bool:
    """Tell whether `node` calls one of the attention operators."""
    return any(node.target is op for op in OPERATORS.values())


def operands_of(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return (q, k, v) of an attention operator, [B, H, S, D] each."""
    arguments = canonical_call(node).arguments
    return arguments["q"], arguments["k"], arguments["v"]


def spec_of(node: fx.Node) -> AttentionSpec:
    """Return what an attention operator computes."""
    return AttentionSpec.of_text(canonical_call(node).arguments["spec"])


def needs_order(node: fx.Node) -> bool:
    """Tell whether the result of an operator depends on the positions of tokens."""
    spec = spec_of(node)
    return spec.is_causal or spec.has_mask


def result_of(node: fx.Node) -> fx.Node:
    """Return the attention that an operator computes, without the log-sum-exp."""
    out = part_of(node, 0)
    assert out is not None, "every operator has its result as a node"
    return out


def part_of(node: fx.Node, number: int) -> fx.Node | None:
    """Return one of several results: out, or the log-sum-exp if that is read."""
    return next((user for user in node.users if user.args[1] == number), None)


def dtype_in_call(call: AttentionCall, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a bias where it is added; autocast changes floats only."""
    cast = fake_value(call.q).dtype != call.dtype
    return call.dtype if cast and dtype.is_floating_point else dtype
