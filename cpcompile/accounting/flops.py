"""Count floating point operations of matrix products, convolutions and attention.

The formulas of torch.utils.flop_counter, and our own for attention: a pair of a query
and a key that it sees costs two operations per multiplication and addition. In causal
attention, and under a mask that the compiler knows, only pairs that are seen count, as
in plans; they are taken to be dealt out evenly to the ranks, which is a matter of the
layout. Key ranges and segment ids that are data count as if they hid nothing.

The operators that communicate have a formula here, and none that torch knows: Inductor
may run an operator with a formula in torch on one rank alone, to time it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from cpcompile.accounting.counted_calls import bound
from cpcompile.geometry.mask_cache import seen_fraction
from cpcompile.geometry.tensor_sizes import elements_of, shape_of
from cpcompile.ops.attention_spec import AttentionSpec
from cpcompile.torch_private import pytree
from cpcompile.torch_private.operators import (
    HigherOrderOperator,
    OpOverload,
    auto_functionalized_v2,
)

aten, cp = torch.ops.aten, torch.ops.cp
invoke_subgraph = torch.ops.higher_order.invoke_subgraph


def has_formula(target: Any) -> bool:
    """Tell whether the work of a call is counted."""
    packet = getattr(target, "overloadpacket", None)
    return packet in _ATTENTION or packet in _PRODUCTS or packet in _TORCHS


def is_unknown(target: Any) -> bool:
    """Tell whether nothing is known of the work of a call, as of a custom kernel.

    Calls of aten without a formula work on each element, and ours exchange values.
    """
    if isinstance(target, HigherOrderOperator):
        return target not in (invoke_subgraph, auto_functionalized_v2)
    if not isinstance(target, OpOverload):
        return False
    return target.namespace not in _NAMESPACES or target.overloadpacket in _MIXERS


def flops_of(target: OpOverload, args: Any, kwargs: Any, result: Any) -> int:
    """Count the operations of a call on tensors of these shapes; whole for DTensors.

    result: what it returns, or something of that shape.
    """
    packet = target.overloadpacket
    if packet in _ATTENTION:
        head_dims, value_dims = _ATTENTION[packet]
        return _attention(bound(target, args, kwargs), head_dims, value_dims)
    if packet in _PRODUCTS:
        lhs, rhs = args[_PRODUCTS[packet] :][:2]
        return 2 * elements_of(lhs) * shape_of(rhs)[-1]
    shapes = pytree.tree_map_only(Tensor, shape_of, (args, kwargs, result))
    return int(flop_registry[packet](*shapes[0], **shapes[1], out_val=shapes[2]))


def flops_of_node(node: fx.Node) -> int:
    """Count the operations of a node on local tensors."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    target = operator_of(node)
    if target is not node.target:
        args, kwargs = (None, kwargs["a"], kwargs["b"]), {}
    return flops_of(target, args, kwargs, node.meta["val"])


def operator_of(node: fx.Node) -> Any:
    """Return what a node calls; for products that tiles add in place, the product."""
    target: Any = node.target
    added = target is auto_functionalized_v2 and node.args[0] is _ADDED
    return node.args[0] if added else target


def tokens_share(node: fx.Node) -> float:
    """Return the sequence's number of queries over the node's, for our attention.

    Other calls have 1.
    """
    if not isinstance(node.target, OpOverload):
        return 1.0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    arguments = bound(node.target, args, kwargs)
    rows = shape_of(arguments["q"])[2] if "sizes" in arguments else 0
    return float(arguments["sizes"][0] / rows) if rows else 1.0


def _attention(arguments: dict[str, Any], head_dims: int, value_dims: int) -> int:
    q, k, v = (
        shape_of(arguments[name if name in arguments else long])
        for name, long in (("q", "query"), ("k", "key"), ("v", "value"))
    )
    q_len, kv_len, *_ = arguments.get("sizes", (q[2], k[2]))
    fraction = _seen(arguments, q_len, kv_len)
    pairs = q[0] * q[1] * q[2] * kv_len * fraction
    return int(2 * pairs * (head_dims * q[3] + value_dims * v[3]))


def _seen(arguments: dict[str, Any], q_len: int, kv_len: int) -> float:
    """Return the part of the pairs that is computed."""
    is_causal = arguments.get("is_causal", False)
    if "spec" in arguments:
        spec = AttentionSpec.of_text(arguments["spec"])
        is_causal = spec.is_causal
        fraction = seen_fraction(spec.mask_key, kv_len)
        if fraction is not None:
            return fraction
    if not is_causal or not q_len * kv_len:
        return 1.0
    some = min(q_len, kv_len)
    pairs = some * (some + 1) // 2 + max(q_len - kv_len, 0) * kv_len
    return pairs / (q_len * kv_len)


# Products of a pair with the head dim, and with the head dim of values.
_FORWARD, _BACKWARD = (1, 1), (3, 2)
_NAMES = ("flash_attention", "efficient_attention", "cudnn_attention",
          "flash_attention_for_cpu")  # fmt: skip
_FORWARDS = [getattr(aten, f"_scaled_dot_product_{x}") for x in _NAMES]
_BACKWARDS = [getattr(aten, f"_scaled_dot_product_{x}_backward") for x in _NAMES]
_OURS: dict[Any, tuple[int, int]] = {
    cp.ring_attention: _FORWARD,
    cp.ring_attention_backward: _BACKWARD,
    cp.all_gather_attention: _FORWARD,
    cp.all_gather_attention_backward: _BACKWARD,
    cp.split_kv_attention: _FORWARD,
    cp.local_attention: _FORWARD,
    cp.local_attention_backward: _BACKWARD,
}
_ATTENTION = {
    **_OURS,
    **dict.fromkeys(_FORWARDS, _FORWARD),
    **dict.fromkeys(_BACKWARDS, _BACKWARD),
}


# The place of the first of two matrices. Of grouped products each row meets one.
_PRODUCTS: dict[Any, int] = {
    aten.mm: 0,
    aten.addmm: 1,
    aten.bmm: 0,
    aten.baddbmm: 1,
    aten._grouped_mm: 0,
    cp.add_product_: 1,
}
_ADDED = cp.add_product_.default
_NAMESPACES = {"aten", "prims", "prim", "inductor", "rngprims", "_dtensor"}
_NAMESPACES |= {"cp", "_c10d_functional", "_c10d_functional_autograd", "c10d"}
_MIXERS = {getattr(cp, name) for name in ("mixer", "mixer_recorded", "mixer_backward")}
_TORCHS = {x for x in flop_registry if str(x).startswith("aten.")}
_TORCHS -= {*_ATTENTION, *_PRODUCTS}


def counted_targets() -> list[OpOverload]:
    """Return overloads of aten with a formula that DTensor makes local calls of."""
    packets = {*_TORCHS, *_PRODUCTS, *_ATTENTION} - set(_OURS)
    return [
        getattr(packet, name)
        for packet in packets
        for name in packet.overloads()
        if not name.endswith("out")
    ]
