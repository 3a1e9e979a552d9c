"""Say in words where the first difference is made."""

from __future__ import annotations

import torch.fx as fx

from cpcompile.apps.verification.differences import CallPlace
from cpcompile.apps.verification.replay.replay import Difference, GraphReplay
from cpcompile.passes.graph.calls import spelled
from cpcompile.passes.graph.cp_attention import call_of, is_cp_attention
from cpcompile.passes.graph.nodes import module_path


def described(
    graph: GraphReplay, difference: Difference, rank: int, dtype: str
) -> CallPlace:
    """Describe a difference in the values of a graph."""
    node = graph.untouched[difference.place]
    readers = _readers(node) if difference.is_gradient else []
    state = graph.states.get(difference.place)
    at = node if _line(node) or not readers else readers[0]
    if not _line(at):
        at = next((x for x in node.users if _line(x)), at)
    return CallPlace(
        what="the gradient" if difference.is_gradient else "the value",
        call=state or (_name(node) if node.op != "placeholder" else "an input"),
        node=node.name,
        written=_written(graph, graph.rewritten[difference.written]),
        read_by=tuple(dict.fromkeys(map(_name, readers))),
        path=module_path(at),
        line=_line(at) or "not known",
        error=difference.deviation.error,
        bound=difference.deviation.bound,
        rank=rank,
        dtype=dtype,
    )


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the calls whose backward makes the gradient of a value."""
    return [x for x in node.users if x.op in ("call_function", "call_method")]


def _name(node: fx.Node) -> str:
    """Name the function of a call, such as "scaled_dot_product_attention"."""
    target = getattr(node.target, "__name__", str(node.target))
    return spelled(node) or target


def _line(node: fx.Node) -> str:
    """Return the innermost line of the model: "model.py:12: y = attention(q, k, v)"."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    starts = [i for i, x in enumerate(lines) if x.strip().startswith("File ")]
    if not starts:
        return ""
    place = lines[starts[-1]].strip()
    _, file, rest = place.split('"', 2)
    number = rest.split("line ", 1)[-1].split(",")[0]
    code = lines[starts[-1] + 1].strip() if starts[-1] + 1 < len(lines) else ""
    return f"{file}:{number}" + (f": {code}" if code else "")


def _written(graph: GraphReplay, node: fx.Node) -> str:
    """Describe what the passes made of a call: the operator, the plan of attention."""
    if node.op == "placeholder":
        return "an input of the graph, full on every rank"
    source = node
    while source.all_input_nodes and not is_cp_attention(source):
        if _name(source) not in ("getitem", "squeeze", "reshape", "unflatten"):
            break
        source = source.all_input_nodes[0]
    if not is_cp_attention(source):
        return f"{_name(node)} (node {node.name})"
    call = call_of(source)
    plan = graph.rewrite.ctx.findings.plans.get(call) if call is not None else None
    layout = "" if plan is None else f", {plan.layout.value} layout"
    return f"{_name(source)} (node {node.name}){layout}"
