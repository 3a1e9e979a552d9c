"""Write a rewritten graph as text: equal texts mean that the same program is traced.

torch's own key of such a graph is made of its code, which cannot be imported again
where calls hold a mesh. Here a function of ours is its name and what it holds; that its
body is the same follows from the digest of our sources, which is in every key.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._functorch._aot_autograd.autograd_cache import (  # private, seen in 2.13
    BypassAOTAutogradCache,
    check_node_safe,
)
from torch._library.triton import get_triton_kernels_for_op
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import Placement

from cpcompile.passes.graph.nodes import module_path


class NoText(Exception):
    """Something in a graph has no text that says all of it."""


def graph_text(gm: fx.GraphModule) -> str:
    """Return all calls of `gm` and of the graphs in it, with all they hold.

    Raises: NoText.
    """
    try:
        return "\n".join(_lines(gm, ""))
    except NoText:
        raise
    except Exception as error:  # a target or argument that nobody has thought of
        raise NoText(repr(error)) from error


def _lines(gm: fx.GraphModule, path: str) -> Iterator[str]:
    if "_checkpoint_context_fn" in gm.meta:  # what it saves is decided by its code
        raise NoText(f"selective checkpointing of {path or 'the graph'}")
    for node in gm.graph.nodes:
        yield _line(node)
    for name, child in gm.named_children():
        if not isinstance(child, fx.GraphModule):
            raise NoText(f"{name} is a module")
        yield f"{path}.{name}:"
        yield from _lines(child, f"{path}.{name}")


def _line(node: fx.Node) -> str:
    if node.op == "get_attr":
        owner: Any = node.graph.owning_module
        value = functools.reduce(getattr, str(node.target).split("."), owner)
        if not isinstance(value, fx.GraphModule):
            raise NoText(f"{node.target} is {type(value).__name__} of the graph")
    target = str(node.target)
    if node.op == "call_function":
        target = _function(node.target, node)
    elif node.op not in ("placeholder", "output", "get_attr", "call_method"):
        raise NoText(f"{node.op} of {node.target}")
    custom = node.meta.get("custom")  # what torch.fx.traceback.annotate says
    parts = (node.args, node.kwargs, module_path(node), custom)
    return f"{node.name} = {node.op} {target} {' '.join(map(_text, parts))}"


def _text(x: Any) -> str:
    if x is None or isinstance(x, bool | int | float | complex | str | bytes):
        return repr(x)
    if isinstance(x, fx.Node):
        return f"%{x.name}"
    if isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(x.node.expr)
    if isinstance(x, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(x)
    if isinstance(x, list | tuple):
        return f"{type(x).__name__}({', '.join(map(_text, x))})"
    if isinstance(x, dict):
        items = (f"{_text(k)}: {_text(v)}" for k, v in x.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(x, slice):
        return f"slice{_text((x.start, x.stop, x.step))}"
    if isinstance(x, range):
        return repr(x)
    if isinstance(x, enum.Enum):
        return str(x)
    return _object(x)


def _object(x: Any) -> str:
    if isinstance(x, Placement):
        return repr(x)
    if isinstance(x, DeviceMesh):
        groups = [group.group_name for group in x.get_all_groups()]
        parts = (x.device_type, x.mesh.tolist(), x.mesh_dim_names, groups)
        return f"mesh{_text((*parts, x.get_coordinate()))}"
    if isinstance(x, ProcessGroup):
        return f"group {x.group_name} {x.rank()} of {x.size()}"
    if isinstance(x, type):
        return f"{x.__module__}.{x.__qualname__}"
    if dataclasses.is_dataclass(x):
        values = [getattr(x, field.name) for field in dataclasses.fields(x)]
        return f"{_text(type(x))}{_text(values)}"
    if type(x) is Tensor and x.layout is torch.strided and not x.requires_grad:
        bits = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        layout = (x.dtype, tuple(x.shape), x.stride(), x.device)
        return f"values{_text(layout)} {hashlib.sha256(bits.numpy().data).hexdigest()}"
    if callable(x):
        return _function(x)
    raise NoText(f"{type(x).__qualname__} has no text")


def _function(f: Any, node: fx.Node | None = None) -> str:
    """Name a function, with what it holds if it was made at run time."""
    if isinstance(f, functools.partial):
        return f"partial{_text((f.func, f.args, f.keywords))}"
    if isinstance(f, types.MethodType):
        return f"{_text(f.__self__)}.{f.__name__}"
    if isinstance(f, types.MethodDescriptorType):  # torch.Tensor.size
        return f"{_text(f.__objclass__)}.{f.__name__}"
    inner = inspect.unwrap(f) if callable(f) else f  # functools.cache, say
    module = getattr(inner, "__module__", None) or ""
    if module.split(".")[0] == "cpcompile":
        return _our_function(f, inner)
    if _has_triton_kernels(f):  # their sources would have to be in the text
        raise NoText(f"{f} runs a Triton kernel of the user")
    if node is not None:
        try:
            check_node_safe(node)
        except BypassAOTAutogradCache as error:
            raise NoText(str(error)) from error
    elif not isinstance(f, _OF_TORCH) and module.split(".")[0] not in _KNOWN:
        raise NoText(f"{f} of module {module or 'unknown'}")
    name = getattr(f, "__qualname__", None) or getattr(f, "__name__", None)
    return f"{module}.{name or f}" if not isinstance(f, _OF_TORCH) else str(f)


_OF_TORCH = (
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
)
_KNOWN = ("torch", "_operator", "builtins", "math")


def _has_triton_kernels(f: Any) -> bool:
    if isinstance(f, torch._ops.HigherOrderOperator):
        return str(f.name()).startswith("triton_kernel")
    if isinstance(f, torch._ops.OpOverloadPacket):
        return any(_has_triton_kernels(getattr(f, name)) for name in f.overloads())
    return isinstance(f, torch._ops.OpOverload) and bool(
        get_triton_kernels_for_op(f._schema.name)
    )


def _our_function(f: Callable[..., Any], inner: Callable[..., Any]) -> str:
    code = getattr(inner, "__code__", None)
    if code is None:
        raise NoText(f"{inner} of cpcompile is no function")
    held = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
    held = [x for x in held if x is not inner and x is not f]  # it may call itself
    held += [getattr(inner, name, None) for name in ("__defaults__", "__kwdefaults__")]
    name = f"{inner.__module__}.{inner.__qualname__} {f.__name__}"
    return f"{name}:{code.co_firstlineno}{_text([x for x in held if x is not None])}"
