"""Warnings about what every rank computes in whole, though it could have a part of it.

Results are right all the same, so that nothing else would tell. A graph without
attention that is no part of a model, as an optimizer step or a loss, has nothing to
share out, and is no reason for a warning.
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from typing import Any

import torch.fx as fx
from torch import Tensor

from cpcompile.geometry.lengths import expected
from cpcompile.logs import warn_once
from cpcompile.passes.graph.context import PARAMETERS, Context, InputKind
from cpcompile.passes.graph.nodes import fake_value, where
from cpcompile.passes.written.leftovers import is_product
from cpcompile.reporting.report import GraphReport

_NAME_IT = 'options={"shard": {"argument": dim}}'
# By process group: lengths of the sequences that attention calls had in any graph.
_attended: dict[str, set[int]] = {}


def warn_about_losses(
    gm: fx.GraphModule, ctx: Context, report: GraphReport, nested: bool
) -> None:
    """Say what of a compiled graph is not shared out, and what would mend it.

    nested: the graph is of a function that Dynamo came across inside of another one,
    which it does not compile.
    """
    attended = _attended.setdefault(ctx.group_name, set())
    attended.update(ctx.sequence_lengths())
    kinds = {given.kind for given in ctx.inputs.values()}
    sharded = bool(kinds & {InputKind.FULL, InputKind.DTENSOR} or ctx.began)
    if not sharded and ctx.plans:
        _about_attention_alone(ctx, report)
    elif not sharded and report.passes:
        _about_idle_part(gm.graph, ctx, report, attended)
        _about_windows_alone(ctx, report)
    _about_written_attention(ctx, report, sharded)
    _about_rows(ctx, report, sharded)
    _about_break(gm, ctx, report)
    if nested:
        _about_hooks(ctx, report)


def _about_hooks(ctx: Context, report: GraphReport) -> None:
    """FSDP2's hooks keep Dynamo from compiling a module as a whole."""
    if any((given.reducer or "").startswith("FSDP2") for given in ctx.inputs.values()):
        warn_once(
            f"{report.frame}: FSDP2's hooks break the graph of the module that is "
            "compiled: its blocks are compiled one by one, each gathers its results, "
            "and what lies between them runs in eager on every rank. Compile the "
            'blocks themselves: block.compile(backend="cp", ...), or, so that nothing '
            "is gathered between them, parallelize_module(block, mesh, "
            "cp.ContextParallel())"
        )


def _about_attention_alone(ctx: Context, report: GraphReport) -> None:
    """Attention is shared out, but no input is."""
    warn_once(
        f"{report.frame}: no input could be inferred to carry the sequence of its "
        f"{len(ctx.plans)} attention calls, so that only these are shared out, and "
        f"all else runs on every rank; name it in {_NAME_IT}"
    )


def _about_written_attention(ctx: Context, report: GraphReport, sharded: bool) -> None:
    """Scores, softmax and values as calls of their own."""
    left = ctx.left_written or ([] if sharded else ctx.by_rows)
    if not left:
        return
    (node, why), count = left[0], len(left) - 1
    more = f" (and {count} more)" if count else ""
    what = f"{report.frame}: attention is written by hand at {where(node)}{more}"
    mend = f"call F.{_ATTENTION} (nn.MultiheadAttention does with need_weights=False)"
    if sharded:
        warn_once(
            f"{what}, and is not shared out, because {why}: every rank gathers the "
            f"keys, and holds the scores of its queries; {mend}"
        )
    else:
        warn_once(
            f"{what}, so that no input could be inferred to carry the sequence, and "
            f"every rank computes everything ({why}); name the input in {_NAME_IT}, "
            f"or {mend}"
        )


def _about_windows_alone(ctx: Context, report: GraphReport) -> None:
    """All attention is by hand and over windows, and no input is sharded."""
    if not ctx.other_written or ctx.calls or ctx.left_written or ctx.by_rows:
        return
    node, count = ctx.other_written[0], len(ctx.other_written) - 1
    more = f" (and {count} more)" if count else ""
    warn_once(
        f"{report.frame}: attention is written by hand at {where(node)}{more}, over "
        "windows or other entries that are no sequence of an input, so that none could "
        "be inferred to carry tokens, and every rank computes everything; name the "
        f"input and its dimension in {_NAME_IT}"
    )


def _about_rows(ctx: Context, report: GraphReport, sharded: bool) -> None:
    """Weights of a rank's queries, and all keys."""
    if not (ctx.by_rows and sharded):
        return
    node, why = ctx.by_rows[0]
    count = len(ctx.by_rows) - 1
    more = f" (and {count} more)" if count else ""
    warn_once(
        f"{report.frame}: attention at {where(node)}{more} is computed by rows of "
        f"queries, because {why}: every rank gathers the keys, and holds the weights "
        "of its queries; needed weights that nothing else reads (need_weights=False, "
        f"output_attentions=False), or F.{_ATTENTION}, to hold a part at a time"
    )


def _about_idle_part(
    graph: fx.Graph, ctx: Context, report: GraphReport, attended: set[int]
) -> None:
    """A graph between breaks that multiplies activations of the sequence by weights."""
    lengths = attended & _activation_sizes(ctx)
    if not lengths or ctx.calls:
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


def _parameters(ctx: Context) -> set[fx.Node]:
    return {n for n, given in ctx.inputs.items() if given.kind in PARAMETERS}


def _activation_sizes(ctx: Context) -> set[int]:
    """Sizes of floating-point inputs that are no parameters, but for their channels."""
    return {
        expected(size)
        for node, given in ctx.inputs.items()
        if given.kind in (InputKind.PLAIN, InputKind.ACTIVATION)
        and isinstance(value := fake_value(node), Tensor)
        and value.is_floating_point()
        for size in value.shape[:-1]
    }


def _about_break(gm: fx.GraphModule, ctx: Context, report: GraphReport) -> None:
    """Where the user's function breaks, and what that costs."""
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
    if ctx.gathered:
        costs.append(f"gathered there on every rank: {', '.join(ctx.gathered)}")
    elif any(placement is not None for placement in ctx.outputs):
        costs.append("values cross it as DTensors")
    elif not inside:
        costs.append("nothing large is gathered there")
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown line"
    warn_once(
        f"graph break in {report.frame} at {place} "
        f"({reason.reason.strip().splitlines()[0]}); {'; '.join(costs)}. Results stay "
        "correct; remove the break to keep everything sharded"
    )


def _calls_attention(frame: Any) -> bool:
    """Whether the statement of a frame, as it is written, calls attention.

    Of a `with` that cannot be compiled all of the body runs outside of any graph.
    """
    return any(
        start <= (frame.lineno or 0) <= end
        for start, end in _statements_with_attention(frame.filename)
    )


@functools.cache
def _statements_with_attention(filename: str) -> tuple[tuple[int, int], ...]:
    """The lines of a file whose failure keeps an attention call out of the graph."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # of another language: what breaks may be anywhere
        return ()
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or _ATTENTION not in set(_names(node)):
            continue
        end = node.end_lineno or node.lineno
        if isinstance(node, ast.With):
            end = max(item.context_expr.end_lineno or end for item in node.items)
        elif not isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
            continue
        found.append((node.lineno, end))
    return tuple(found)


_ATTENTION = "scaled_dot_product_attention"


def _names(statement: ast.AST) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
