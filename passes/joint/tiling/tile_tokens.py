"""Run what is large and token-wise tile by tile, forward and backward.

    logits = mm(h, W)                     for each tile of tokens:
    loss = sum(f(logits, labels))    ->       loss, dh, dW += tile(h, W, labels)
    dlogits = df(logits, labels) * g      dh * g, dW * g
    dh, dW = mm(dlogits, W'), ...

No more than one tile of logits exists then. The pass works on the joint graph of
AOTAutograd, of one rank's tokens, in which gradients are calls as all others are. So
it knows nothing of losses and layers: a region is what makes and reads large values,
and is token-wise. A region whose gradients follow from one number computes them in the
forward; others run forward and backward, which computes again what the forward made.

Left alone: values of symbolic size, calls without a rule in flow/dim_rules, regions
that would gain nothing.

A tile is one function, torch's invoke_subgraph, that is compiled once and called for
each tile. Losses in which tokens, and the mean over them, are one call of aten are
decomposed first, as Inductor does by itself. The gradient of a sum is one number:

    getitem(split(expand(tangents_1, [1, S]), S/N, 1), r)
      ->  expand(tangents_1, [1, S/N])        for S tokens, N ranks and rank r
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cpcompile.torch_private.fake_tensors import detect_fake_mode
from cpcompile.torch_private.operators import core_aten_decompositions

from ...graph.graph_pass import graph_pass
from ...graph.nodes import module_path, sort_calls, value_of
from ...graph.sequence_tokens import TokenAxis
from .insert_tiles import insert_tiles
from .region_parts import parts_at
from .tile_program import copied
from .tile_regions import JointFacts, RegionPart, bytes_of, is_view, seeds

_MOST_TILES = 64
_LEAST_TOKENS = 64


@dataclass(frozen=True)
class TiledRegion:
    """One region that runs in tiles.

    path: the module in which its largest value is made. tokens: of this rank. tile:
    tokens at a time. untiled, tiled: bytes of its values at a time, without and with
    tiles. gradients_at_once: whether the forward computes the gradients too.
    """

    path: str
    tokens: int
    tile: int
    untiled: int
    tiled: int
    gradients_at_once: bool

    def __str__(self) -> str:
        sizes = f"{self.tiled / 2**20:.1f} of {self.untiled / 2**20:.1f} MiB"
        return f"{self.path}: {self.tile} of {self.tokens} tokens at a time, {sizes}"


@dataclass(frozen=True)
class Tiling:
    """The input of `tile_tokens` in addition to its graph.

    tile: tokens of one tile; None lets `tile_bytes` decide.
    tile_bytes: what the values of one tile may take at a time.
    least: bytes of the smallest value that is worth tiles.
    recompute: whether regions are cut whose backward computes values again.
    fixed: which inputs of the program hold no tokens, such as parameters.
    found: gets what was cut. returned: large values that are results of the program,
        (module path, bytes), and keep a loss from running in tiles.
    """

    tile: int | None
    tile_bytes: int
    least: int
    recompute: bool
    fixed: frozenset[int]
    found: list[TiledRegion] = field(default_factory=list, compare=False)

    returned: list[tuple[str, int]] = field(default_factory=list, compare=False)

    def key(self) -> tuple[Any, ...]:
        """Return what a cache of compiled graphs has to tell apart."""
        return (self.tile, self.tile_bytes, self.least, self.recompute, self.fixed)


NO_TILES = Tiling(None, 0, 0, False, frozenset())


@graph_pass()
def tile_tokens(graph: fx.Graph, ctx: Tiling) -> int:
    """Run regions in tiles; return how many regions."""
    inputs = graph.find_nodes(op="placeholder")
    tangents = [x for x in inputs if x.name.startswith("tangents")]
    fixed = [x for x in inputs if _number(x) in ctx.fixed]
    if not fixed:  # nobody knows what is no token, or it is the graph of a tile
        return 0
    fake_mode = detect_fake_mode([value_of(x) for x in inputs])
    with fake_mode or nullcontext():
        write_out_losses(graph, ctx.least)
        expand_parts(graph)
    facts = JointFacts.of(graph, tangents, fixed)
    order = {node: i for i, node in enumerate(graph.nodes)}
    taken: set[fx.Node] = set()
    regions: list[tuple[RegionPart, ...]] = []
    for seed in seeds(graph, facts, ctx.least):
        parts = None if seed in taken else parts_at(seed, facts, order)
        if parts is None:
            continue
        nodes = {x for part in parts for x in part.nodes}
        several = any(_tile(part, ctx) < part.region.tokens for part in parts)
        if several and not taken & nodes:
            if len(parts) == 1 or ctx.recompute:
                regions.append(parts)
                ctx.found.append(_described(seed, parts, ctx))
            else:
                ctx.returned.extend(_returned(graph, parts))
        taken |= nodes
    for number, parts in enumerate(regions):
        inside = {x for part in parts for x in part.nodes}
        for i, part in enumerate(parts):
            with fake_mode or nullcontext():
                _replace(part, _tile(part, ctx), f"tile_{number}_{i}", inside, order)
    if regions:
        sort_calls(graph)
        graph.eliminate_dead_code()
        graph.lint()
    return len(regions)


def _returned(
    graph: fx.Graph, parts: tuple[RegionPart, ...]
) -> Iterator[tuple[str, int]]:
    """Yield (module path, bytes) of large values of a region that leave the program."""
    largest = max(map(bytes_of, parts[0].nodes))
    for node in parts[0].outputs:
        if 2 * bytes_of(node) < largest:
            continue
        later = [node]  # as large: collectives that gather it, and views
        for x in later:
            later += [user for user in x.users if _is_passed_on(user, largest)]
        if graph.output_node() in later:
            yield module_path(node), bytes_of(node)


def _is_passed_on(node: fx.Node, largest: int) -> bool:
    is_tensor = isinstance(value_of(node), Tensor)
    return not is_tensor or 2 * bytes_of(node) >= largest


def _described(
    seed: fx.Node, parts: tuple[RegionPart, ...], ctx: Tiling
) -> TiledRegion:
    n = parts[0].region.tokens
    tile, peak = max(_tile(x, ctx) for x in parts), max(map(_peak, parts))
    at_once = parts[0].gradient is not None
    return TiledRegion(module_path(seed), n, tile, peak, peak * tile // n, at_once)


def _number(node: fx.Node) -> int | None:
    """Return which input of the program a placeholder is; None if it is none.

    The placeholder is one of a joint or a forward graph.
    """
    if match := re.fullmatch(r"primals_(\d+)", node.name):
        return int(match[1]) - 1
    match = re.fullmatch(r"arg(\d+)_1", node.name)
    return None if match is None else int(match[1])


def _tile(part: RegionPart, ctx: Tiling) -> int:
    """Return the number of tokens of a tile."""
    n = part.region.tokens
    if ctx.tile is not None:
        return min(n, ctx.tile)
    tiles = min(math.ceil(_peak(part) / ctx.tile_bytes), _MOST_TILES)
    most = max(math.ceil(n / tiles), _LEAST_TOKENS)
    # tiles of one size need one function
    equal = [t for t in range(most, most // 2, -1) if n % t == 0]
    return equal[0] if equal else min(most, n)


def _peak(part: RegionPart) -> int:
    """Return the most bytes that values with tokens take at once without tiles."""
    last = {x: i for i, node in enumerate(part.nodes) for x in node.all_input_nodes}
    alive = peak = 0
    for i, node in enumerate(part.nodes):
        alive += _own_bytes(node, part)
        peak = max(peak, alive)
        for x in node.all_input_nodes:
            if last[x] == i and x in part.nodes and x not in part.outputs:
                alive -= _own_bytes(x, part)
    return peak


def _own_bytes(node: fx.Node, part: RegionPart) -> int:
    """Return the bytes that a value with tokens takes; a view takes none."""
    if not isinstance(part.result(node), TokenAxis):
        return 0
    return 0 if is_view(node) else bytes_of(node)


def _replace(
    part: RegionPart,
    tile: int,
    name: str,
    inside: set[fx.Node],
    order: dict[fx.Node, int],
) -> None:
    """Put the calls of tiles in the place of a part.

    inside: the calls of all parts of its region, which compute again what they read.
    """
    readers = [
        u for x in part.outputs for u in x.users if u in order and u not in inside
    ]
    first = min(readers, key=order.__getitem__)
    results = insert_tiles(part, tile, name, first)
    for node, result in zip(part.outputs, results, strict=True):
        node.replace_all_uses_with(
            result, delete_user_cb=lambda user: user not in inside, propagate_meta=False
        )


aten = torch.ops.aten
_LOSSES = (
    aten.nll_loss_forward.default,
    aten.nll_loss_backward.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default,
)
_INHERITED = ("stack_trace", "nn_module_stack", "seq_nr", "recompute", "ac_graph_id")


def write_out_losses(graph: fx.Graph, least: int) -> None:
    """Decompose losses that read a value of `least` bytes or more, in place."""
    for target in _LOSSES:
        for node in graph.find_nodes(op="call_function", target=target):
            if max(map(bytes_of, node.all_input_nodes)) >= least:
                _write_out(node)


def _write_out(node: fx.Node) -> None:
    operands = node.all_input_nodes

    def call(*tensors: Tensor) -> Any:
        tensor_of = dict(zip(operands, tensors, strict=True))
        target: Any = node.target
        return target(*fx.node.map_arg(node.args, tensor_of.__getitem__))

    values = [value_of(x) for x in operands]
    table: Any = core_aten_decompositions()
    traced = make_fx(call, decomposition_table=table)(*values)
    inputs = traced.graph.find_nodes(op="placeholder")
    copies = dict(zip(inputs, operands, strict=True))
    with node.graph.inserting_before(node):
        results: Any = node.graph.graph_copy(traced.graph, copies)
    for copy in set(copies.values()) - set(operands):
        copy.meta.update({k: node.meta[k] for k in _INHERITED if k in node.meta})
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem, f"{user} is no item of {node}"
            user.replace_all_uses_with(results[user.args[1]])
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def expand_parts(graph: fx.Graph) -> None:
    """Replace parts of expanded values, in place."""
    for split in list(graph.nodes):
        if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
            continue
        source, _, dim = (*split.args, 0)[:3]
        if source.target is not aten.expand.default:
            continue
        number, sizes = source.args[:2]
        dim %= len(sizes)
        own = (1,) * (len(sizes) - value_of(number).dim()) + value_of(number).shape
        if own[dim] != 1:
            continue
        parts = list(split.users)
        if any(isinstance(value_of(x).shape[dim], torch.SymInt) for x in parts):
            continue  # no node has that size, and tiles are of no symbolic size
        for part in parts:
            part_sizes = [*sizes[:dim], value_of(part).shape[dim], *sizes[dim + 1 :]]
            with graph.inserting_before(part):
                args = (number, part_sizes)
                expanded = copied(graph, aten.expand.default, args, {}, source)
            part.replace_all_uses_with(expanded, propagate_meta=False)
            graph.erase_node(part)
        graph.erase_node(split)
