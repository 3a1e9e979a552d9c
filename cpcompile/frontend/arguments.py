"""Find which graph input is which argument of the user's function.

Dynamo says of every graph input where it came from, as an expression such as
`L['batch']['tokens']`; its last parts are the names that `options={"shard": ...}` uses.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import CodeType
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.errors import InputError
from cpcompile.passes.graph.context import Buffer
from cpcompile.passes.graph.nodes import fake_value
from cpcompile.torch_patches.skipped_frames import called_by_user_code
from cpcompile.torch_private.dynamo import (
    ChainedSource,
    InstructionTranslator,
    NNModuleSource,
    Source,
)

# A parameter or buffer, which is no argument whatever its name.
_OF_MODULE = re.compile(r"\._(parameters|buffers|modules)\[")
_PART = re.compile(r"\['([^']+)'\]|\[(\d+)\]|\.([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Frame:
    """The Python frame that Dynamo is compiling."""

    name: str
    values: Mapping[str, Any]
    nested: bool = False  # called by a function that Dynamo runs, not by the user
    code: CodeType | None = None

    @classmethod
    def current(cls) -> Frame:
        """Return the frame being compiled; an empty one if there is none."""
        try:
            tx = InstructionTranslator.current_tx()
        except AttributeError:  # no frame: the graph was not made by Dynamo
            return cls("<graph>", {})
        nested = called_by_user_code()
        return cls(tx.f_code.co_name, dict(tx.f_locals), nested, tx.f_code)

    @property
    def is_part(self) -> bool:
        """Tell whether this is only a part of what the user compiled.

        A part is the rest of a function after a graph break, or a function that it
        calls.
        """
        return self.nested or self.name.startswith("torch_dynamo_resume")

    def argument_names(self) -> dict[str, Any]:
        """Return every name of an argument, in "batch.tokens" style, with its value."""
        arguments: dict[str, Any] = {}
        for name, value in self.values.items():
            if name not in ("self", "args") or not _is_plumbing(value):
                _collect(name, value, arguments)
        positional = self.values.get("args")
        for name, value in zip(
            self._positional_names(), positional or (), strict=False
        ):
            arguments.setdefault(name, value)
        return arguments

    def positional_name(self, index: int) -> str | None:
        """Return the name of the index-th of *args, where a wrapper hides it."""
        names = self._positional_names()
        return names[index] if index < len(names) else None

    def _positional_names(self) -> list[str]:
        owner = self.values.get("self", self.values.get("fn"))
        owner = getattr(owner, "__self__", owner)  # a bound method's module
        return _forward_names(owner) if isinstance(owner, torch.nn.Module) else []


def _forward_names(module: torch.nn.Module) -> list[str]:
    """List forward's positional arguments; for a wrapper, those of what it wraps."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    children = list(module.children())
    hidden = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if not names and hidden and len(children) == 1:
        return _forward_names(children[0])
    return names


def named_inputs(
    graph: fx.Graph, shard: Mapping[str, int], frame: Frame, earlier: set[str]
) -> dict[fx.Node, tuple[str, int]]:
    """Return the placeholders that `shard` names, with name and dimension.

    A name is the argument's name, or the end of its dotted path ("batch.tokens").
    Names in `earlier` were found in an earlier graph of the same compiled function and
    may be absent from this one, which may be a part of it; `earlier` grows.

    Raises: InputError for a name that no argument has, that several have, or that is
    not a tensor.
    """
    paths = {
        node: path
        for node in graph.find_nodes(op="placeholder")
        if (path := argument_path(node, frame)) is not None
    }
    named: dict[fx.Node, tuple[str, int]] = {}
    for name, dim in shard.items():
        wanted = tuple(name.split("."))
        matches = [n for n, path in paths.items() if path[-len(wanted) :] == wanted]
        matches = [n for n in matches if paths[n] == wanted] or matches
        tensors = [n for n in matches if isinstance(fake_value(n), Tensor)]
        if len(tensors) > 1:
            several = ", ".join(sorted(".".join(paths[n]) for n in tensors))
            raise InputError(
                f"options['shard'] names {name!r}, and several arguments are called "
                f"so: {several}; needed one: use its dotted path"
            )
        if tensors:
            named[tensors[0]] = (name, dim)
        elif name not in earlier and not frame.is_part:
            _check_absent(name, wanted, frame)
    earlier.update(shard)
    return named


def _check_absent(name: str, wanted: tuple[str, ...], frame: Frame) -> None:
    """Raise InputError for a name that is no argument, or not a tensor's.

    A name without a graph input is fine only if this graph does not use it.
    """
    arguments = frame.argument_names()
    matches = [
        value
        for path, value in arguments.items()
        if tuple(path.split("."))[-len(wanted) :] == wanted
    ]
    if not matches:
        tensors = sorted(
            path for path, value in arguments.items() if isinstance(value, Tensor)
        )
        raise InputError(
            f"options['shard'] names {name!r}, and no argument of {frame.name} is "
            f"called so; the tensors among its arguments are: "
            f"{', '.join(tensors) or 'none'}"
        )
    if not any(value is None or isinstance(value, Tensor) for value in matches):
        raise InputError(
            f"options['shard'] names {name!r}, and that is of type "
            f"{type(matches[0]).__name__}; needed a tensor"
        )


def argument_path(node: fx.Node, frame: Frame) -> tuple[str, ...] | None:
    """Return ("batch", "tokens") for an input that came from L['batch']['tokens'].

    Return None for what is no argument: parameters and buffers, globals.
    """
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return None
    name = _text(source)
    parts = [key or index or attr for key, index, attr in _PART.findall(name)]
    if not name.startswith("L") or not parts or _OF_MODULE.search(name):
        return None
    if parts[0] in ("args", "kwargs") and len(parts) > 1:
        if parts[0] == "kwargs":
            parts = parts[1:]
        elif parts[1].isdigit():
            hidden = frame.positional_name(int(parts[1]))
            parts = parts if hidden is None else [hidden, *parts[2:]]
    return tuple(parts)


def state_name(node: fx.Node) -> str | None:
    """Return "parameter layers.0.weight", "buffer mask", or None if it is neither."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return None
    kinds = _OF_MODULE.findall(_text(source))
    if not {"parameters", "buffers"} & set(kinds):
        return None
    return f"{kinds[-1].removesuffix('s')} {_path(source)}"


def module_buffers(graph: fx.Graph) -> dict[fx.Node, Buffer]:
    """Return the graph's inputs that modules hold, have a value, and are no parameters.

    These are buffers, and tensors that are plain attributes or items of attributes.
    """
    buffers: dict[fx.Node, Buffer] = {}
    for node in graph.find_nodes(op="placeholder"):
        name, graph_arg = state_name(node), node.meta.get("grapharg")
        value = getattr(graph_arg, "example", None)
        if graph_arg is None or type(value) is not Tensor:
            continue
        if name is None and _is_held(graph_arg.source):
            name = f"attribute {_path(graph_arg.source)}"
        if name is None or name.startswith("parameter "):
            continue
        if not (value.is_meta or value.requires_grad or value.is_inference()):
            buffers[node] = Buffer(name, value, graph_arg.source)
    return buffers


def _text(source: Source) -> str:
    return source.name() if callable(source.name) else source.name  # 2.11: a method


def _path(source: Source) -> str:
    parts = [key or index or attr for key, index, attr in _PART.findall(_text(source))]
    inner = {"_modules", "_parameters", "_buffers", "self"}
    return ".".join(part for part in parts if part not in inner)


def _is_held(source: Source) -> bool:
    """Tell whether a module holds the input, and not the caller."""
    while isinstance(source, ChainedSource):
        if isinstance(source, NNModuleSource):
            return True
        source = source.base
    return False


def _is_plumbing(value: Any) -> bool:
    return isinstance(value, tuple) or hasattr(value, "named_parameters")


def _collect(path: str, value: Any, collected: dict[str, Any]) -> None:
    collected[path] = value
    items: dict[str, Any] = {}
    if isinstance(value, Mapping):
        items = {k: v for k, v in value.items() if isinstance(k, str)}
    elif is_dataclass(value) and not isinstance(value, type):
        items = {f.name: getattr(value, f.name) for f in fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = dict(zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple):
        items = {str(place): inner for place, inner in enumerate(value)}
    for name, inner in items.items():
        _collect(name if path in ("kwargs",) else f"{path}.{name}", inner, collected)
