"""Read what a call does in one spelling, however the model spells it.

    x.swapaxes(1, 2)    torch.transpose(x, 1, 2)    aten.transpose.int(x, 1, 2)
      ->  Call("transpose", {"input": x, "dim0": 1, "dim1": 2}, aten.transpose.int)

Calls are read, not changed: what runs is what the model has. torch says which overload
of aten a method, an operator of Python or a builtin function is, and the schema says
what its arguments are. Functions that are written in Python have their own signature.
No other file has a table of spellings, or knows an argument by its position.
"""

from __future__ import annotations

import inspect
import operator
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.fx.operator_schemas import normalize_function

from cpcompile.ops.plain_attention import plain_attention
from cpcompile.torch_private.operators import OpOverload, OpOverloadPacket

from .constant_arguments import Method
from .nodes import fake_value

# Operations that have several names in torch or in Python.
_SAME = {
    "concat": "cat", "concatenate": "cat", "swapaxes": "transpose",
    "swapdims": "transpose", "moveaxis": "movedim", "type": "to", "type_as": "to",
    "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "T": "numpy_T", "H": "matrix_H",
}  # fmt: skip
# Methods named after the dtype that they convert to.
_CASTS = {
    "half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32,
    "double": torch.float64, "short": torch.int16, "int": torch.int32,
    "long": torch.int64, "bool": torch.bool,
}  # fmt: skip
NEW_TENSORS = (
    "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like",
    "full_like", "empty_like", "zeros", "ones", "full", "empty",
)  # fmt: skip
"""Calls that make a tensor and read no value of their operands."""

_ITEMS = {"getitem": ("input", "index"), "setitem": ("input", "index", "value")}
# Keywords that torch takes too, most of them as numpy has them.
_KEYWORDS = {"axis": "dim", "keepdims": "keepdim", "x": "input", "axis0": "dim0",
             "axis1": "dim1"}  # fmt: skip
# Names of arguments in aten, with the name that a function in Python has for each.
_IN_PYTHON = {"dropout": {"train": "training"}, "embedding": {"indices": "input"}}
_PYTHON_ALONE = "torch.nn.functional"  # aten has other arguments, or nothing
_PYTHON = (_PYTHON_ALONE, "torch.functional", "torch._tensor")

_OVERLOAD = "cp_overload"  # in node.meta: a target and its overload


@dataclass(frozen=True)
class Call:
    """A call by the name of its operation; "" if it is none that torch knows.

    arguments: all arguments by name, in the order of the schema, with defaults for
        those that are not given. What aten's schemas call `self` is "input".
    overload: None for functions that are written in Python.
    """

    name: str
    arguments: dict[str, Any]
    overload: OpOverload | None = None


_UNKNOWN = Call("", {})


def canonical_call(node: fx.Node) -> Call:
    """Return the call that a node makes, by the canonical name of its operation."""
    name = spelled(node)
    if not name:
        return _UNKNOWN
    if name in _ITEMS:
        return Call(name, dict(zip(_ITEMS[name], node.args, strict=True)))
    if _module(node) == _PYTHON_ALONE or node.target is plain_attention:
        bound = _bound(node.target, node.args, node.kwargs)
        return _UNKNOWN if bound is None else Call(name, bound)
    args, kwargs = (node.args, node.kwargs) if "::" in name else _given(node)
    overload = _overload(node, name, args, kwargs)
    if overload is None:
        return _UNKNOWN
    bound = _bound(overload, _packed(overload, args), kwargs) or {}
    canonical_names = _IN_PYTHON.get(name, {})
    return Call(
        name, {canonical_names.get(k, k): x for k, x in bound.items()}, overload
    )


def spelled(node: fx.Node) -> str:
    """Return the name of the operation that a node calls, "" if it is none of torch.

    The name has a namespace unless that is aten.
    """
    target: Any = node.target
    if node.op not in ("call_function", "call_method"):
        return ""
    if isinstance(target, OpOverload | OpOverloadPacket):
        packet: Any = getattr(target, "overloadpacket", target)
        name = str(packet._qualified_op_name).removeprefix("aten::")
    elif target is getattr:
        name = str(node.args[1])
    elif _method(node):
        name = "to" if _method(node) in _CASTS else _method(node)
    elif target is plain_attention:
        name = "scaled_dot_product_attention"
    else:
        name = target.__name__ if _is_of_torch(target) else ""
    if name.startswith("__") or _module(node) == "_operator":
        name = name.strip("_")
        if name.startswith("i") and all(
            hasattr(operator, f"__{x}__") for x in (name, name[1:])
        ):
            return _SAME.get(name[1:], name[1:]) + "_"  # iadd is add_
    return _SAME.get(name, name)


def function_of(node: fx.Node) -> Callable[..., Any]:
    """Return what a node calls as a function; methods become functions."""
    if isinstance(node.target, str):
        return Method(node.target)
    assert callable(node.target)
    return node.target


def _method(node: fx.Node) -> str:
    """Return the method that a node calls by its name or as a function; "" if none."""
    target: Any = node.target
    if isinstance(target, Method):
        return target.name
    return target if isinstance(target, str) else ""


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Change an argument of a call in the place where it is passed."""
    call = canonical_call(node)
    position = list(call.arguments).index(name)
    if position >= len(node.args):
        other_kwargs = {
            k: x for k, x in node.kwargs.items() if _KEYWORDS.get(k) != name
        }
        node.kwargs = other_kwargs | {name: value}
        return
    args = node.args if call.overload is None else _packed(call.overload, node.args)
    node.args = (*args[:position], value, *args[position + 1 :])


def _given(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call as an overload of aten takes them."""
    args, kwargs = node.args, node.kwargs
    if node.target is getattr:
        return args[:1], {}
    if _method(node) in _CASTS:
        args = (*args, _CASTS[_method(node)])
    if _module(node) == "torch.functional":  # aten's have other names for arguments
        bound = _bound(node.target, args, kwargs)
        args, kwargs = (args, kwargs) if bound is None else (tuple(bound.values()), {})
    of_python = ("requires_grad", *(["out"] if kwargs.get("out") is None else []))
    named = {_KEYWORDS.get(k, k): x for k, x in kwargs.items() if k not in of_python}
    return args, named


def _bound(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments by name, with defaults; None if they cannot be told."""
    normalized = normalize_function(
        target, args, kwargs, normalize_to_only_use_kwargs=True
    )
    return None if normalized is None else normalized.kwargs


def _overload(
    node: fx.Node, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OpOverload | None:
    """Return the overload of an operation that a node calls; its meta remembers it."""
    target: Any = node.target
    names = (name, f"aten::{name}")
    if isinstance(target, OpOverload) and target._schema.name in names:
        return target
    cached: tuple[Any, OpOverload | None] = node.meta.get(_OVERLOAD, (None, None))
    if cached[0] != target:
        packet: Any = target if "::" in name else getattr(torch.ops.aten, name, None)
        overload = None if packet is None else _resolved(packet, args, kwargs)
        cached = node.meta[_OVERLOAD] = (target, overload)
    return cached[1]


def _resolved(
    packet: OpOverloadPacket, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OpOverload | None:
    """Find the overload that takes these arguments in the way that torch finds it."""
    every: list[OpOverload] = [getattr(packet, x) for x in packet.overloads()]
    takes_out = [
        any(x.is_out for x in candidate._schema.arguments) for candidate in every
    ]
    if takes_out.count(False) == 1 and "out" not in kwargs:
        return every[takes_out.index(False)]
    values = tuple(map(_example, args))
    examples = {k: _example(x) for k, x in kwargs.items()}
    for way in _ways(values):
        for first in ("input", "self"):
            named = {first if k == "input" else k: x for k, x in examples.items()}
            overload = _takes(packet, way, named)
            if overload is None:
                continue
            if way is values or len(_packed(overload, values)) == len(way):
                return overload
    for overload in every:
        if _takes(packet, *_with_lists(overload, values, examples)) is overload:
            return overload
    return None


def _with_lists(
    overload: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make lists of ints where the schema has lists.

    conv1d(x, weight, padding=2) becomes conv1d(x, weight, padding=[2]).
    """
    arguments = overload._schema.arguments
    lists = {x.name for x in arguments if str(x.type) == "List[int]"}

    def as_list(name: str, x: Any) -> Any:
        return [x] if name in lists and _is_int(x) else x

    by_place = zip((x.name for x in arguments), args, strict=False)
    return tuple(as_list(*x) for x in by_place), {
        k: as_list(k, x) for k, x in kwargs.items()
    }


def _takes(
    packet: OpOverloadPacket, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OpOverload | None:
    """Return the overload that takes exactly these arguments; None if none does."""
    name = packet._qualified_op_name
    try:
        overload_name = torch._C._jit_resolve_packet(name, *args, **kwargs)
    except RuntimeError:  # none does
        return None
    overload: OpOverload = getattr(packet, overload_name)
    return overload


def _ways(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments with sizes as one list, and as they are.

    So view(x, 2, 3) is tried as view(x, [2, 3]) first.
    """
    first = next((i for i, x in enumerate(args) if _is_int(x)), len(args))
    if first < len(args) and all(map(_is_int, args[first:])):
        yield (*args[:first], list(args[first:]))
    yield args


def _packed(overload: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments by position, with sizes given one by one as one list.

    torch's parser does so where a list of integers is the last argument by position.
    """
    positional = [x for x in overload._schema.arguments if not x.kwarg_only]
    last = len(positional) - 1
    if last < 0 or len(args) <= last or str(positional[last].type) != "List[int]":
        return args
    return (*args[:last], list(args[last:])) if _is_int(args[last]) else args


def _is_int(x: Any) -> bool:
    value = fake_value(x)
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _example(x: Any) -> Any:
    """Return a value of the type of an argument; which one does not matter.

    It is no tensor of the graph: torch would try to take a tensor without dimensions
    for a number.
    """
    value = fake_value(x)
    if isinstance(value, list | tuple):
        return [_example(element) for element in value]
    return next((x for kind, x in _EXAMPLES.items() if isinstance(value, kind)), value)


_EXAMPLES = {
    torch.Tensor: torch.empty(2, device="meta"),
    torch.SymInt: 1,
    torch.SymFloat: 1.0,
    torch.SymBool: True,
}


def _is_of_torch(target: Any) -> bool:
    """Tell whether a function is one of torch, or an operator of Python."""
    module = getattr(target, "__module__", None) or ""
    if inspect.isfunction(target):
        return module in _PYTHON
    if isinstance(target, types.MethodDescriptorType):
        return True
    return inspect.isbuiltin(target) and module.split(".")[0] in ("torch", "_operator")


def _module(node: fx.Node) -> str:
    """Return the module that a function is written in.

    It is "" for builtin functions of torch, and for methods.
    """
    module = getattr(node.target, "__module__", None) or ""
    return module if inspect.isfunction(node.target) or module == "_operator" else ""
