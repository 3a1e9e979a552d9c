"""Describe what a call is, apart from where its operands come from.

Two calls have one signature exactly if Inductor would make the same of both: the same
operator and constants, and values of the same dtype, shape, strides, offset and device.
Names, modules and lines of the user do not count.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import plain_size
from cpcompile.ops.comm.communicating import communicates
from cpcompile.torch_private.operators import OpOverload

aten = torch.ops.aten

# Calls without operands whose result follows from their arguments.
CONSTANTS = (
    aten.full.default,
    aten.scalar_tensor.default,
    aten.zeros.default,
    aten.ones.default,
    aten.arange.start_step,
    torch.ops.prims.iota.default,
)
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


def signature(node: fx.Node) -> Hashable:
    """Return a key that is equal for two nodes if one may stand for the other.

    None for a node that must stay.
    """
    if not is_foldable(node):
        return None
    try:
        parts = (_frozen(node.args), _frozen(node.kwargs), _frozen(node.meta["val"]))
        if isinstance(node.target, OpOverload) and node.target.namespace == "aten":
            return (node.target, *parts)
        strides = _frozen(node.meta.get("eager_input_vals"))
        return (node.target, *parts, strides)
    except _UnknownValue:
        return None


def is_foldable(node: fx.Node) -> bool:
    """Tell whether a call may stand in a function: it neither writes nor draws."""
    if node.op != "call_function" or "val" not in node.meta:
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node)
    if not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return _has_no_dropout(node)
    return is_message(node) or not node.is_impure()


def _has_no_dropout(node: fx.Node) -> bool:
    """Tell whether a call that may draw random numbers is attention that does not."""
    assert isinstance(node.target, OpOverload)
    arguments = [x.name for x in node.target._schema.arguments]
    by_name = dict(zip(arguments, node.args, strict=False)) | node.kwargs
    return "dropout_p" in arguments and not by_name.get("dropout_p")


def is_collective(node: fx.Node) -> bool:
    """Tell whether a call is a functional collective of torch, or waits for one."""
    return getattr(node.target, "namespace", None) == "_c10d_functional"


def is_message(node: fx.Node) -> bool:
    """Tell whether a call exchanges something with other ranks, or waits for it."""
    return is_collective(node) or communicates(node.target)


def is_waited_for(node: fx.Node) -> bool:
    """Tell whether a value is there as soon as the call returns."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    return not is_collective(node) or node.target is wait


class _UnknownValue(Exception):
    """Raised for a value whose equality is not known."""


def _frozen(value: Any) -> Hashable:
    if isinstance(value, fx.Node):
        return ("node", _frozen(value.meta.get("val")))
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise _UnknownValue
        sizes = map(_frozen, (*value.shape, *value.stride(), value.storage_offset()))
        flags = (value.is_conj(), value.is_neg())
        return (value.dtype, value.device, value.dim(), tuple(sizes), flags)
    if isinstance(value, list | tuple):
        return (type(value), *map(_frozen, value))
    if isinstance(value, Mapping):
        return tuple((name, _frozen(value[name])) for name in sorted(value))
    if isinstance(value, torch.SymInt):
        return ("size", plain_size(value))
    if type(value) in _PLAIN:
        return (type(value), repr(value))  # 0.0 is not -0.0, and 1 is not True
    raise _UnknownValue
