"""Write graphs as text: for traces, for goldens, and for the check that ranks agree.

    name = target(arguments)  # shape placement

One node a line. Methods have a dot before their name, and x[:, 0] is an index.
Arguments of operators have the names of the schema, except for the tensors at the
front; what rows of attention steps see has those of Visible. Arguments that are equal
to their defaults are left out, and so are meshes and the values of constants.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.visibility import Visible
from cpcompile.ops.attention_spec import AttentionSpec
from cpcompile.ops.mixers.mixer_call import TEXT_OF_CALL, MixerCall
from cpcompile.ranks.shardings import placements_text
from cpcompile.torch_private.operators import OpOverload

from .constant_arguments import ConstantArgument
from .nodes import sub_graph, whole_value

_Names = dict[fx.Node, str]


def readable(
    graph: fx.Graph, left_out: Callable[[fx.Node], bool] = lambda node: False
) -> str:
    """Return the graph as text, with checkpoint regions below their calls.

    The text is the same in every run, and on every rank except for the local shapes of
    uneven shards. Nodes that are `left_out` have no line: where one is read, an index
    appears as `x[0]`, and any other call as its first argument.
    """
    names: _Names = {}
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {_text(node.args[0], names)}")
        elif left_out(node):
            is_index = node.target is operator.getitem
            source = names[node.all_input_nodes[0]]
            names[node] = _call(node, names) if is_index else source
        else:
            names[node] = node.name
            comment = _comment(whole_value(node))
            lines.append(f"{node.name} = {_call(node, names)}{comment}")
        region = sub_graph(node)
        if region is not None:
            inside = readable(region.graph, left_out).splitlines()
            lines += ["    " + line for line in inside]
    return "\n".join(lines)


def _call(node: fx.Node, names: _Names) -> str:
    """Return the text that follows the name of a node."""
    target: Any = node.target
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"get_attr {target}"
    if target is operator.getitem:
        return f"{_text(node.args[0], names)}[{_index(node.args[1], names)}]"
    if isinstance(target, OpOverload):
        name = str(target).removesuffix(".default")
        return f"{name}({', '.join(_arguments_by_schema(node, target, names))})"
    is_method = isinstance(target, str)
    name = f".{target}" if is_method else getattr(target, "__name__", str(target))
    arguments = [
        _text(value, names)
        for value in node.args
        if not (isinstance(value, ConstantArgument) and value.label is None)
    ]
    arguments += [f"{k}={_text(value, names)}" for k, value in node.kwargs.items()]
    return f"{name}({', '.join(arguments)})"


def _arguments_by_schema(
    node: fx.Node, target: OpOverload, names: _Names
) -> Iterator[str]:
    schema = target._schema.arguments
    arguments = {x.name: value for x, value in zip(schema, node.args, strict=False)}
    arguments |= node.kwargs
    at_the_front = True
    for argument in schema:
        at_the_front &= argument.name in arguments and "Tensor" in str(argument.type)
        if argument.name not in arguments:
            continue
        value: Any = arguments[argument.name]
        if argument.name == "visible":
            at_the_front = False
            for name, pair in vars(Visible.of_list(value)).items():
                if pair is not None:
                    yield f"{name}={_text(list(pair), names)}"
            continue
        is_spec = argument.name == "spec"
        text = _spec(str(value)) if is_spec else _text(value, names)
        if text == _implied(argument):
            at_the_front = False
        else:
            yield text if at_the_front else f"{argument.name}={text}"


def _implied(argument: Any) -> str | None:
    """Return the text with which an argument is left out; None if there is none.

    It is the text of the default. Without a default it is "None" for an optional
    argument, and "[]" for a list that is needed.
    """
    if argument.has_default_value():
        return _text(argument.default_value, {})
    if isinstance(argument.type, torch.OptionalType):
        return "None"
    return "[]" if isinstance(argument.type, torch.ListType) else None


def _text(value: Any, names: _Names) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, slice):
        step = "" if value.step is None else f":{_text(value.step, names)}"
        ends = ("" if x is None else _text(x, names) for x in (value.start, value.stop))
        return ":".join(ends) + step
    if isinstance(value, tuple | list):
        inner = ", ".join(_text(x, names) for x in value)
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, ConstantArgument):
        return str(value.label)
    if isinstance(value, str) and value.startswith(TEXT_OF_CALL):
        return repr(MixerCall.of_text(value).readable)
    if isinstance(value, str):
        lines = value.splitlines()
        return repr(value) if len(lines) < 2 else f"<text of {len(lines)} lines>"
    return "..." if value is Ellipsis else str(value)


def _spec(text: str) -> str:
    """Return the text of an AttentionSpec without what cannot be read at a glance."""
    spec = AttentionSpec.of_text(text)
    lines = spec.score_mod.splitlines()
    short = str(replace(spec, scale=float(_text(spec.scale, {})), score_mod=""))
    return repr(short + f" score_mod=<text of {len(lines)} lines>" * bool(lines))


def _index(value: Any, names: _Names) -> str:
    """Return the text in the brackets of x[:, None]."""
    if isinstance(value, tuple) and value:
        return ", ".join(_text(x, names) for x in value)
    return _text(value, names)


def _comment(value: Any) -> str:
    if not isinstance(value, Tensor):
        return ""
    placement = placements_text(value)
    where_it_is = "" if placement == "plain" else f" {placement}"
    return f"  # {list(value.shape)}{where_it_is}"
