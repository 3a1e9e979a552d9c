"""Warn about what every rank computes in whole, or gathers, though it need not.

Results are right all the same, so that nothing else would show it. Every text names the
line, what it costs by the account of the graph, and the way out. A graph without
attention that is no part of a model, as an optimizer step or a loss, has nothing to
share out, and is no reason for a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx
import torch.nn as nn
from torch import Tensor

from cpcompile.accounting.graph_account import (
    Exchange,
    LineWork,
    Purpose,
    grouped,
    total,
)
from cpcompile.geometry.lengths import expected
from cpcompile.geometry.tensor_sizes import bytes_of
from cpcompile.logs import warn_once
from cpcompile.passes.graph.context import PARAMETERS, Context, InputKind
from cpcompile.passes.graph.nodes import all_nodes, fake_value, where
from cpcompile.passes.graph.rule_to_write import rule_to_write
from cpcompile.passes.model.patterns.unmatched import NOT_KNOWN, is_product
from cpcompile.reporting.graph_report import GraphReport
from cpcompile.reporting.ways_out import (
    CALL_IT,
    MEBIBYTE,
    NAME_IT,
    REORDERED,
    GraphBreakPlace,
)
from cpcompile.torch_patches.graph_breaks import GraphBreak, break_at, breaks

MOST_WORK = 1.2
"""Work of all ranks together over one device's; more is a reason for a warning."""
_NAMED = 5  # lines
LEAST_BYTES, LEAST_PART = 2**20, 0.01
"""A line below either limit is not worth a word: this number of bytes, and this part of
the work, or of all bytes that a rank receives."""
# By process group: lengths of the sequences that attention calls had in any graph.
_attended: dict[str, set[int]] = {}
_SAMPLES = 2  # dimensions of values that have no sequence: samples and channels
_CORRECT = ". Results stay correct; "
AFTER_BREAK = "torch_dynamo_resume_in_"  # Dynamo's name of what follows a break


def forget() -> None:
    """Forget the sequences of other graphs, as for another program."""
    _attended.clear()


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
    if kinds & {InputKind.FULL, InputKind.DTENSOR} or ctx.findings.token_origins:
        _about_attention_by_hand(ctx, report)
    else:
        _about_whole_sequences(gm, ctx, report, attended, nested)
    _about_breaks(gm, ctx, report, bool(attended))
    if nested:
        _about_hooks(ctx, report)
    if report.distributed_calls:
        _about_lines(report)


def _about_whole_sequences(
    gm: fx.GraphModule,
    ctx: Context,
    report: GraphReport,
    attended: set[int],
    nested: bool,
) -> None:
    """Warn that no input of a graph carries the sequence, and say why."""
    found, fix = ctx.findings, f"name the input in {NAME_IT}"
    by_hand = [*found.unmatched_attention, *found.row_parallel]
    products, sizes = _products(gm.graph, ctx), _activation_sizes(ctx)
    # One of them may be a head, which is compiled by itself.
    is_model = len(list(filter(_has_sequence, products))) > 1
    if found.plans:
        cause = (
            "no input could be inferred to carry the sequence of its "
            f"{len(found.plans)} attention calls, so that only these are shared out"
        )
        fix += _rule_to_write(gm.graph)
        if before := _breaks_before(report):
            at = GraphBreakPlace.of(before[-1])
            fix = f"it comes after the graph break at {at}: {at.fix}"
    elif by_hand:
        at_hand, why = _first([x for x, _ in by_hand]), by_hand[0][1]
        cause = f"nothing is sharded: attention is written by hand at {at_hand} ({why})"
        fix += f", or {CALL_IT}"
    elif not report.passes or found.calls:
        return
    elif products and attended & sizes:
        cause = (
            f"the graph with {where(products[0])} has no attention call, and its "
            f"inputs of {max(attended & sizes)} tokens are plain"
        )
        fix = (
            "remove the graph break around it, or pass DTensors (cp.shard), which "
            f"stay sharded from graph to graph, or {fix}"
        )
    elif found.other_softmaxes:
        cause = (
            "nothing is sharded: attention is written by hand at "
            f"{_first(found.other_softmaxes)}, over windows or other entries that are "
            "no sequence of an input"
        )
    elif not (nested or attended or _breaks(gm) or _comes_after_break(report)):
        if not is_model:
            return
        cause = (
            "nothing is sharded: its inputs are plain, and no attention, no mixer that "
            "is known and no embedding says which dimension is the sequence"
        )
    else:
        return
    price = f"{report.account.work().ratio:.2f} times the work of one device"
    warn_once(
        f"{report.frame}: {cause}; the {report.ranks} ranks together do {price}; {fix}"
    )


def _has_sequence(node: fx.Node) -> bool:
    value = fake_value(node)
    return isinstance(value, Tensor) and value.ndim > _SAMPLES


def _breaks(gm: fx.GraphModule) -> bool:
    reason = getattr(gm, "compile_subgraph_reason", None)
    return reason is not None and bool(reason.graph_break)


def _comes_after_break(report: GraphReport) -> bool:
    return report.frame.startswith(AFTER_BREAK)


def _breaks_before(report: GraphReport) -> Sequence[GraphBreak]:
    """Return the breaks that a graph follows, by the line in its name, or else all."""
    if not _comes_after_break(report):
        return ()
    line = report.frame.rpartition("_at_")[2]
    here = [x for x in breaks() if any(line == f"{n}" for _, n in x.places)]
    return here or breaks()


def _rule_to_write(graph: fx.Graph) -> str:
    """Return the line that tells DTensor of a custom operator of tokens; or ""."""
    for node in all_nodes(graph):
        given = tuple(map(fake_value, node.args))
        named = {name: fake_value(x) for name, x in node.kwargs.items()}
        value = fake_value(node)
        text = rule_to_write(node.target, where(node), given, named, value)
        if text:
            return text
    return ""


def _about_attention_by_hand(ctx: Context, report: GraphReport) -> None:
    """Warn about scores, softmax and values in separate calls of a sharded graph.

    Nothing is lost where a rank has its own entries of the batch, such as windows.
    """
    by_hand = (*ctx.findings.unmatched_attention, *ctx.findings.row_parallel)
    shares = zip((node for node, _ in by_hand), report.by_hand, strict=True)
    for rows in grouped(shares, lambda x: (x[1].form, x[1].reason)):
        nodes, part, why = [x for x, _ in rows], rows[0][1].form, rows[0][1].reason
        if part == "batch":
            continue
        how = "is computed by rows of queries" if part else "is not shared out"
        size, who = bytes_of(fake_value(nodes[0])), "all queries"
        if part:
            size, who = size // report.ranks, "its queries"
        fix = CALL_IT
        if part and why != NOT_KNOWN:
            fix = (
                "needed weights that nothing else reads (need_weights=False, "
                "output_attentions=False), or F.scaled_dot_product_attention, to hold "
                "a part at a time"
            )
        warn_once(
            f"{report.frame}: attention is written by hand at {_first(nodes)}, and "
            f"{how}, because {why}: every rank gathers the keys, and holds the weights "
            f"of {who}, {size / MEBIBYTE:.1f} MiB each; {fix}"
        )


def _first(nodes: list[fx.Node]) -> str:
    """Say where the first one is, and how many others there are."""
    more = f" (and {len(nodes) - 1} more)" if len(nodes) > 1 else ""
    return f"{where(nodes[0])}{more}"


def _parameters(ctx: Context) -> set[fx.Node]:
    return {
        n
        for n, graph_input in ctx.inputs.items()
        if graph_input.kind in PARAMETERS
        or isinstance(fake_value(n), nn.Parameter)  # frozen
    }


def _products(graph: fx.Graph, ctx: Context) -> list[fx.Node]:
    """Return the products with parameters."""
    parameters = _parameters(ctx)
    return [
        node
        for node in graph.nodes
        if is_product(node) and parameters & {*node.all_input_nodes}
    ]


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


def _about_breaks(
    gm: fx.GraphModule, ctx: Context, report: GraphReport, attended: bool
) -> None:
    """Warn where the user's function breaks, and say what that costs.

    Before some breaks the function has no graph; see `graph_breaks`.
    """
    is_model = any(map(_has_sequence, _products(gm.graph, ctx)))
    reason: Any = getattr(gm, "compile_subgraph_reason", None)
    if _breaks(gm) and (report.distributed_calls or is_model):
        cost = "attention that is called there runs in whole on every rank"
        if gathered := ctx.findings.gathered_results:
            size = report.account.received(Purpose.RESULT) / MEBIBYTE
            names = ", ".join(gathered)
            cost += f"; gathered there on every rank, {size:.1f} MiB: {names}"
        elif any(placement is not None for placement in ctx.findings.outputs):
            cost += "; values cross it as DTensors"
        places = tuple((x.filename, x.lineno or 0) for x in reason.user_stack)
        noted = break_at(places[-1]) if places else None
        at = GraphBreakPlace.of(noted or GraphBreak(reason.reason, places))
        warn_once(f"graph break in {report.frame} at {at}; {cost}{_CORRECT}{at.fix}")
    for at in map(GraphBreakPlace.of, _breaks_before(report) if attended else ()):
        if not warn_once.mentions(f"{at}"):
            warn_once(
                f"graph break at {at}: what comes after it, as {report.frame}, is a "
                "graph of its own; plain values come into it whole on every rank, and "
                f"attention alone may be shared out there{_CORRECT}{at.fix}"
            )


def _about_hooks(ctx: Context, report: GraphReport) -> None:
    """Warn that FSDP2's hooks keep Dynamo from compiling a module as a whole."""
    if any((x.reducer or "").startswith("FSDP2") for x in ctx.inputs.values()):
        warn_once(
            f"{report.frame}: FSDP2's hooks break the graph of the module that is "
            "compiled: its blocks are compiled one by one, each gathers its results, "
            "and what lies between them runs in eager on every rank. Compile the "
            'blocks themselves: block.compile(backend="cp", ...), or, so that nothing '
            "is gathered between them, parallelize_module(block, mesh, "
            "cp.ContextParallel())"
        )


def _about_lines(report: GraphReport) -> None:
    """Name the lines that repeat work or gather values, if these are much of a step."""
    account, work = report.account, report.account.work()
    values = account.exchanges(Purpose.VALUE)
    attention, gathered = (
        account.received(x) for x in (Purpose.ATTENTION, Purpose.VALUE)
    )
    more = {x.line: x.repeated_flops(work.ranks) for x in work.repeated}
    ratio = 1 + sum(more.values()) / (work.whole_flops or 1)
    lines: list[str] = []
    if ratio > MOST_WORK:
        lines += [
            f"{_place(x)} (work is done again: {more[x.line] / work.whole_flops:.0%})"
            for x in work.repeated
            if x.bytes >= LEAST_BYTES and more[x.line] >= LEAST_PART * work.whole_flops
        ]
    if gathered > attention:
        least = max(LEAST_BYTES, LEAST_PART * account.received())
        rows = map(total, grouped(values, lambda x: x.line))
        lines += [
            f"{_place(x)} (gathers {x.bytes / MEBIBYTE:.1f} MiB"
            + (f" in {x.calls} calls)" if x.calls > 1 else ")")
            for x in sorted(rows, key=lambda x: -x.bytes)
            if x.bytes >= least
        ]
    if lines:
        others = f", and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
        warn_once(
            f"{report.frame}: the {report.ranks} ranks together do {ratio:.2f} times "
            f"the work of one device, and each receives {gathered / MEBIBYTE:.1f} MiB "
            f"of values beside {attention / MEBIBYTE:.1f} MiB for attention, because "
            f"of {'; '.join(lines[:_NAMED])}{others}{_CORRECT}{REORDERED}. "
            "print(cp.explain(...)) lists every line"
        )


def _place(row: Exchange | LineWork) -> str:
    """Say where a row belongs, with the folders of its file."""
    line = row.line
    at = f"{line.file}:{line.number}" if line.number else str(line)
    return at if row.what == "<top level>" else f"{at} in {row.what}"
