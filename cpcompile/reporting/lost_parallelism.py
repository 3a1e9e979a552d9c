"""Warn about what every rank computes in whole, though it could have a part of it.

Results are right all the same, so that nothing else would show it. A graph without
attention that is no part of a model, as an optimizer step or a loss, has nothing to
share out, and is no reason for a warning.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.fx as fx
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from cpcompile.geometry.lengths import expected
from cpcompile.logs import warn_once
from cpcompile.passes.graph.context import PARAMETERS, Context, InputKind
from cpcompile.passes.graph.held import Callee
from cpcompile.passes.graph.nodes import all_nodes, expected_shape, fake_value, where
from cpcompile.passes.model.patterns.unmatched import NOT_KNOWN, is_product
from cpcompile.reporting.break_texts import place_text, way_out
from cpcompile.reporting.graph_report import GraphReport, part_of_attention
from cpcompile.torch_patches.graph_breaks import (
    SourceLine,
    break_at,
    breaks,
    reason_text,
)
from cpcompile.torch_private.operators import OpOverload

_NAME_IT = 'options={"shard": {"argument": dim}}'
# By process group: lengths of the sequences that attention calls had in any graph.
_attended: dict[str, set[int]] = {}
_told: set[SourceLine] = set()  # lines of graph breaks that were named
_WITH_RULES = ("aten", "prims", "cp")  # operators that are no custom ones
_SAMPLES = 2  # dimensions of values that have no sequence: samples and channels
_AFTER_BREAK = "torch_dynamo_resume_in_"  # Dynamo's name of what follows a break


@contextmanager
def told_apart() -> Iterator[None]:
    """Warn of the graphs inside of the block as if there were no others."""
    before = dict(_attended), set(_told)
    _attended.clear()
    _told.clear()
    try:
        yield
    finally:
        _attended.clear()
        _told.clear()
        _attended.update(before[0])
        _told.update(before[1])


def warn_about_losses(
    gm: fx.GraphModule, ctx: Context, report: GraphReport, nested: bool
) -> None:
    """Say what of a compiled graph is not shared out, and what would fix it.

    nested: whether the graph belongs to a function that Dynamo came across inside of
        another function, which it does not compile.
    """
    attended = _attended.setdefault(ctx.group_name, set())
    attended.update(ctx.sequence_lengths())
    kinds = {graph_input.kind for graph_input in ctx.inputs.values()}
    sharded = bool(
        kinds & {InputKind.FULL, InputKind.DTENSOR} or ctx.findings.token_origins
    )
    if not sharded and ctx.findings.plans:
        _about_attention_alone(gm.graph, ctx, report)
    elif not sharded and report.passes:
        _about_idle_part(gm.graph, ctx, report, attended)
        _about_windows_alone(ctx, report)
        if not (nested or attended):
            _about_nothing(gm, ctx, report)
    _about_attention_patterns(ctx, report, sharded)
    _about_break(gm, ctx, report)
    if attended:
        _about_break_before(report)
    if nested:
        _about_hooks(ctx, report)


def _about_hooks(ctx: Context, report: GraphReport) -> None:
    """Warn that FSDP2's hooks keep Dynamo from compiling a module as a whole."""
    if any(
        (graph_input.reducer or "").startswith("FSDP2")
        for graph_input in ctx.inputs.values()
    ):
        warn_once(
            f"{report.frame}: FSDP2's hooks break the graph of the module that is "
            "compiled: its blocks are compiled one by one, each gathers its results, "
            "and what lies between them runs in eager on every rank. Compile the "
            'blocks themselves: block.compile(backend="cp", ...), or, so that nothing '
            "is gathered between them, parallelize_module(block, mesh, "
            "cp.ContextParallel())"
        )


def _about_attention_alone(graph: fx.Graph, ctx: Context, report: GraphReport) -> None:
    """Warn that attention is shared out, but no input is."""
    fix = f"name it in {_NAME_IT}{_rule_to_write(graph)}"
    warn_once(
        f"{report.frame}: no input could be inferred to carry the sequence of its "
        f"{len(ctx.findings.plans)} attention calls, so that only these are shared "
        f"out, and all else runs on every rank; {_way_out_of_break(report) or fix}"
    )


def _rule_to_write(graph: fx.Graph) -> str:
    """Return the line that tells DTensor of a custom operator of tokens; or ""."""
    for node in all_nodes(graph):
        call, args, value = node.target, node.args, fake_value(node)
        if args and isinstance(args[0], Callee):  # on gathered tensors
            call, args = args[0].function, args[2:]
        if not isinstance(call, OpOverload) or call.namespace in _WITH_RULES:
            continue
        if not isinstance(value, Tensor) or value.ndim < 2:
            continue
        names = [x.name for x in call._schema.arguments]
        operands = dict(zip(names, args, strict=False)) | node.kwargs
        shards = [_placement(fake_value(operands.get(x)), value) for x in names]
        return (
            f"; or, if {call} at {where(node)} computes every token by itself, say so "
            "before the first call, by torch.distributed.tensor.experimental: "
            f"register_sharding(torch.ops.{call})(lambda {', '.join(names)}: "
            f"[([Shard(1)], [{', '.join(shards)}])])"
        )
    return ""


def _placement(operand: Any, result: Tensor) -> str:
    if not isinstance(operand, Tensor):
        return "None"
    return "Shard(1)" if operand.shape[:2] == result.shape[:2] else "Replicate()"


def _about_attention_patterns(ctx: Context, report: GraphReport, sharded: bool) -> None:
    """Warn about attention by hand: scores, softmax and values in separate calls.

    Nothing is lost where a rank has its own entries of the batch, such as windows.
    """
    by_hand = [*ctx.findings.unmatched_attention, *ctx.findings.row_parallel]
    if by_hand and not sharded:
        softmax, why = by_hand[0]
        warn_once(
            f"{report.frame}: attention is written by hand at "
            f"{_first([x for x, _ in by_hand])}, so that no input could be inferred to "
            f"carry the sequence, and every rank computes everything ({why}); name the "
            f"input in {_NAME_IT}, or {_CALL_IT}"
        )
        return
    groups: dict[tuple[str | None, str], list[fx.Node]] = {}
    for softmax, why in by_hand:
        groups.setdefault((part_of_attention(softmax, ctx), why), []).append(softmax)
    for (part, why), nodes in groups.items():
        if part is None:
            warn_once(
                f"{report.frame}: attention is written by hand at {_first(nodes)}, and "
                f"is not shared out, because {why}: {_holds(nodes[0], ctx, 'scores')}; "
                f"{_CALL_IT}"
            )
        elif part == "rows":
            read_twice = (
                "needed weights that nothing else reads (need_weights=False, "
                f"output_attentions=False), or F.{_ATTENTION}, to hold a part at a time"
            )
            warn_once(
                f"{report.frame}: attention at {_first(nodes)} is computed by rows of "
                f"queries, because {why}: {_holds(nodes[0], ctx, 'weights')}; "
                f"{_CALL_IT if why == NOT_KNOWN else read_twice}"
            )


def _first(nodes: list[fx.Node]) -> str:
    """Say where the first one is, and how many others there are."""
    more = f" (and {len(nodes) - 1} more)" if len(nodes) > 1 else ""
    return f"{where(nodes[0])}{more}"


def _holds(softmax: fx.Node, ctx: Context, what: str) -> str:
    """Say what a rank holds of the scores, or weights, of this softmax."""
    value = fake_value(softmax)
    if not isinstance(value, DTensor) or value.placements[ctx.axis].is_replicate():
        return f"every rank gathers, computes and holds the {what} of all queries"
    pairs, parts = expected_shape(value)[-2:], list(softmax.all_input_nodes)
    while parts:
        node = parts.pop()
        x = fake_value(node)
        if not isinstance(x, DTensor) or expected_shape(x)[-2:] != pairs:
            continue
        if x.ndim == value.ndim and x.placements[ctx.axis].is_replicate():
            if any(isinstance(fake_value(y), DTensor) for y in node.all_input_nodes):
                return (
                    f"{node.name} at {where(node)} gathers the {what} of all queries "
                    "on every rank"
                )
            continue  # a mask, or a bias
        parts += node.all_input_nodes
    return f"every rank gathers the keys, and holds the {what} of its queries"


def _about_windows_alone(ctx: Context, report: GraphReport) -> None:
    """Warn if all attention is by hand and over windows, and no input is sharded."""
    if (
        not ctx.findings.other_softmaxes
        or ctx.findings.calls
        or ctx.findings.unmatched_attention
        or ctx.findings.row_parallel
    ):
        return
    at = _first(ctx.findings.other_softmaxes)
    warn_once(
        f"{report.frame}: attention is written by hand at {at}, over windows or other "
        "entries that are no sequence of an input, so that none could be inferred to "
        "carry tokens, and every rank computes everything; name the input and its "
        f"dimension in {_NAME_IT}"
    )


def _about_idle_part(
    graph: fx.Graph, ctx: Context, report: GraphReport, attended: set[int]
) -> None:
    """Warn about a graph between breaks that multiplies whole sequences by weights."""
    lengths = attended & _activation_sizes(ctx)
    if not lengths or ctx.findings.calls:
        return
    parameters = _parameters(ctx)
    for node in graph.nodes:
        if is_product(node) and parameters & {*node.all_input_nodes}:
            warn_once(
                f"{report.frame}: the graph with {where(node)} has no attention call, "
                "and its inputs are plain, so that every rank computes all of its "
                f"{max(lengths)} tokens; remove the graph break around it, or pass "
                "DTensors (cp.shard), which stay sharded from graph to graph, or name "
                f"its input in {_NAME_IT}"
            )
            return


def _about_nothing(gm: fx.GraphModule, ctx: Context, report: GraphReport) -> None:
    """Warn about a model in which nothing says what the sequence is.

    Attention by hand, softmaxes and graph breaks have warnings of their own.
    """
    found, reason = ctx.findings, getattr(gm, "compile_subgraph_reason", None)
    breaks_here = reason is not None and reason.graph_break
    if breaks_here or report.frame.startswith(_AFTER_BREAK):
        return
    if found.calls or found.unmatched_attention or found.row_parallel:
        return
    if found.other_softmaxes:
        return
    parameters = _parameters(ctx)
    products = [
        node
        for node in gm.graph.nodes
        if is_product(node)
        and parameters & {*node.all_input_nodes}
        and isinstance(value := fake_value(node), Tensor)
        and value.ndim > _SAMPLES
    ]
    if len(products) > 1:  # one may be a head, which is compiled by itself
        warn_once(
            f"{report.frame}: nothing is sharded, and every rank computes everything: "
            "its inputs are plain, and no attention, no mixer that is known and no "
            f"embedding says which dimension is the sequence; name it in {_NAME_IT}"
        )


def _parameters(ctx: Context) -> set[fx.Node]:
    return {
        n
        for n, graph_input in ctx.inputs.items()
        if graph_input.kind in PARAMETERS
        or isinstance(fake_value(n), nn.Parameter)  # frozen
    }


def _activation_sizes(ctx: Context) -> set[int]:
    """Return the sizes of plain floating-point inputs, except for their channels."""
    parameters = _parameters(ctx)
    return {
        expected(size)
        for node, graph_input in ctx.inputs.items()
        if graph_input.kind in (InputKind.PLAIN, InputKind.ACTIVATION)
        and node not in parameters
        and isinstance(value := fake_value(node), Tensor)
        and value.is_floating_point()
        for size in value.shape[:-1]
    }


def _about_break(gm: fx.GraphModule, ctx: Context, report: GraphReport) -> None:
    """Warn where the user's function breaks, and say what that costs."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return
    frames = list(reason.user_stack)
    inside = bool(frames) and _calls_attention(frames[-1])
    if not (report.distributed_calls or inside):
        return
    costs = []
    if inside:
        costs.append(
            "its scaled_dot_product_attention runs there in whole on every rank"
        )
    if ctx.findings.gathered_results:
        costs.append(
            f"gathered there on every rank: {', '.join(ctx.findings.gathered_results)}"
        )
    elif any(placement is not None for placement in ctx.findings.outputs):
        costs.append("values cross it as DTensors")
    elif not inside:
        costs.append("nothing large is gathered there")
    places = tuple((x.filename, x.lineno or 0) for x in frames)
    noted = break_at(places[-1]) if places else None
    text = reason.reason if noted is None else noted.text
    _told.update(places[-1:])
    places = places if noted is None else noted.places
    warn_once(
        f"graph break in {report.frame} at {place_text(places)} "
        f"({reason_text(reason.reason)}); {'; '.join(costs)}. Results stay "
        f"correct; {way_out(text, places)}"
    )


def _about_break_before(report: GraphReport) -> None:
    """Warn about a break before which the function has no graph; see `graph_breaks`."""
    if not report.frame.startswith(_AFTER_BREAK):
        return
    for graph_break in breaks():
        if graph_break.places[-1] in _told:
            continue
        _told.add(graph_break.places[-1])
        warn_once(
            f"graph break at {place_text(graph_break.places)} "
            f"({reason_text(graph_break.text)}): what comes after it, as "
            f"{report.frame}, is a graph of its own; plain "
            "values come into it whole on every rank, and attention alone may be "
            "shared out there. Results stay correct; "
            f"{way_out(graph_break.text, graph_break.places)}"
        )


def _way_out_of_break(report: GraphReport) -> str | None:
    """Return how to fix that a graph follows a break; None if it follows none."""
    if not report.frame.startswith(_AFTER_BREAK) or not breaks():
        return None
    last = breaks()[-1]
    return (
        f"it comes after the graph break at {place_text(last.places)} "
        f"({reason_text(last.text)}): {way_out(last.text, last.places)}"
    )


def _calls_attention(frame: Any) -> bool:
    """Tell whether the statement of a frame, as it is written, calls attention.

    If a `with` cannot be compiled, all of its body runs outside of any graph.
    """
    return any(
        start <= (frame.lineno or 0) <= end
        for start, end in _statements_with_attention(frame.filename)
    )


@functools.cache
def _statements_with_attention(filename: str) -> tuple[tuple[int, int], ...]:
    """Return lines of a file whose failure keeps an attention call out of the graph."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # of another language: what breaks may be anywhere
        return ()
    line_ranges = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or _ATTENTION not in set(_names(node)):
            continue
        end = node.end_lineno or node.lineno
        if isinstance(node, ast.With):
            end = max(item.context_expr.end_lineno or end for item in node.items)
        elif not isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
            continue
        line_ranges.append((node.lineno, end))
    return tuple(line_ranges)


_ATTENTION = "scaled_dot_product_attention"
_CALL_IT = f"call F.{_ATTENTION} (nn.MultiheadAttention does with need_weights=False)"


def _names(statement: ast.AST) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
