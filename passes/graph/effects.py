"""Tell what calls do to memory: which give views, and which write."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from cpcompile.torch_private.dynamo import triton_kernel_wrapper_mutation

from .calls import Call, canonical_call, spelled
from .nodes import all_nodes, fake_value, storage

# Not called by its own name where Dynamo meets a kernel; in torch 2.11 to 2.14.
_TRITON_KERNEL = triton_kernel_wrapper_mutation


def view_of(node: fx.Node) -> fx.Node | None:
    """Return the argument whose memory the result may share, by the call's schema.

    None if there is none.
    """
    call = canonical_call(node)
    shared: list[Any] = []
    if call.name == "getitem":
        index = call.arguments["index"]
        items = index if isinstance(index, tuple) else (index,)
        copies = any(
            isinstance(x, list) or getattr(fake_value(x), "ndim", 0) for x in items
        )
        shared = [] if copies else [call.arguments["input"]]
    elif call.overload is not None and call.overload.is_view:
        shared = [x for argument, x in _by_schema(call) if argument.alias_info]
    if call.name == "to" and fake_value(shared[0]).dtype != fake_value(node).dtype:
        return None
    return next((x for x in shared if isinstance(x, fx.Node)), None)


def _by_schema(call: Call) -> list[tuple[Any, Any]]:
    """Return the arguments of an overload, each after what its schema says of it."""
    assert call.overload is not None
    every = call.overload._schema.arguments
    return list(zip(every, call.arguments.values(), strict=True))


def is_in_place(node: fx.Node) -> bool:
    """Tell whether a call writes to an argument, by its schema or by torch's naming."""
    if node.target is _TRITON_KERNEL or node.kwargs.get("out") is not None:
        return True
    call = canonical_call(node)
    if call.overload is not None:
        return call.overload._schema.is_mutable
    if call.name == "setitem" or call.arguments.get("inplace") is True:
        return True
    name = spelled(node) or getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return what an in-place call writes to; for a Triton kernel all of its inputs."""
    if node.target is _TRITON_KERNEL:
        return node.all_input_nodes
    call = canonical_call(node)
    if call.overload is not None:
        bases = [x for argument, x in _by_schema(call) if argument.is_write]
    else:
        bases = [*(call.arguments.values() or node.args), node.kwargs.get("input")][:1]
        bases.append(node.kwargs.get("out"))
    lists = [x if isinstance(x, list | tuple) else [x] for x in bases]
    return [x for tensors in lists for x in tensors if isinstance(x, fx.Node)]


def written_memory(graph: fx.Graph) -> set[int | None]:
    """Return the memory to which calls write, also those in checkpoint regions."""
    return {
        storage(x)
        for node in all_nodes(graph)
        if node.op in ("call_function", "call_method") and is_in_place(node)
        for x in written_by(node)
    }


def has_effects(node: fx.Node) -> bool:
    """Tell whether a call does more than to give a result, which nobody may read.

    fx alone takes a method that writes, such as x[:2].copy_(y), for one without.
    """
    is_call = node.op in ("call_function", "call_method")
    return node.is_impure() or (is_call and is_in_place(node))


def enables_gradients(graph: fx.Graph) -> bool:
    """Tell whether a program computes gradients though it is called without."""
    return any(
        node.target is torch._C._set_grad_enabled and node.args[0] is not False
        for node in graph.nodes
    )


# How programs write into a cache.
_KEEPS = {"setitem", "index_copy_", "copy_"}


def kept_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Return the inputs into which the program writes numbers, as into a cache of keys.

    They are memory of the caller that lives from call to call, and no data of this
    call.
    """
    inputs: set[fx.Node] = set()
    for node in graph.nodes:
        if canonical_call(node).name in _KEEPS:
            inputs.update(x for x in written_by(node) if x.op == "placeholder")
    return {x for x in inputs if fake_value(x).is_floating_point()}
