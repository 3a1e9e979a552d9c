"""Send gradients and sharded parameters in buckets, while others are computed.

Note [Buckets and what hides them]
Joining collectives is torch's; which of them, where a bucket leaves and where it is
waited for, is decided here, in the graph:

    all-reduce of gradients      leaves when the last gradient of the bucket is there;
                                 waited for at the end
    reduce-scatter of gradients  the same, but at most two are on their way, because a
                                 whole gradient lives until it has been sent
    gather of parameters         leaves when the second bucket before it is needed;
                                 waited for when it is needed, so that three live

Inductor has passes for this too (`reorder_for_compute_comm_overlap`). They move nodes
as far as the peak of memory allows, and in torch 2.13 past other collectives: where
ranks hold uneven shards, peaks and so orders differ between them, and each waits for
another message. They also took a quarter of the compile time of twelve layers. Here the
order follows from the graph alone, which is the same on every rank, and
collective_order.py keeps it while Inductor orders the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

# Private, seen in 2.13 to 2.15, probed in inductor_compat.py.
from torch._inductor.fx_passes import bucketing
from torch._inductor.pattern_matcher import stable_topological_sort

from cpcompile.ops.comm.communicating import communicates
from cpcompile.torch_private.inductor import inductor_config

from ..graph.graph_pass import graph_pass

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# Of the buckets of a graph only the first gather and the last sum have nothing to hide
# them. 25 MB is what DistributedDataParallel sends at once; below 1 MB a message takes
# its latency.
_BUCKETS_PER_GRAPH, _SMALLEST_MEGABYTES, _LARGEST_MEGABYTES = 16, 1.0, 25.0

_SCATTERED_AT_ONCE = 2
_AHEAD = 2  # buckets of parameters that are gathered before they are needed

# Inductor's function that joins collectives, and the setting that says how.
_MERGING: dict[Any, tuple[str, str]] = {
    c10d.all_reduce.default: ("merge_all_reduce_bucket", ""),
    c10d.reduce_scatter_tensor.default: (
        "merge_reduce_scatter_bucket",
        "bucket_reduce_scatters_bucket_mode",
    ),
    c10d.all_gather_into_tensor.default: (
        "merge_all_gather_bucket",
        "bucket_all_gathers_bucket_mode",
    ),
}


def has_own_settings() -> bool:
    """Tell whether the user has set Inductor's passes for collectives."""
    names = ("all_reduces", "all_gathers", "reduce_scatters")
    joins = any(getattr(inductor_config, f"bucket_{n}_fx") != "none" for n in names)
    return joins or inductor_config.reorder_for_compute_comm_overlap


@graph_pass()
def send_in_buckets(graph: fx.Graph, megabytes: float | None) -> int:
    """Join and place the collectives of Note [Buckets and what hides them].

    Returns how many there are. megabytes: the size with which a bucket leaves; 0 only
    places, None chooses by what there is.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    buckets = find_buckets(graph, megabytes)
    sums = [*buckets.reduced, *buckets.scattered]
    moving = {x for bucket in sums for node in bucket for x in (node, _wait(node))}
    _sum(graph, buckets.reduced, moving, None)
    _sum(graph, buckets.scattered, moving, _SCATTERED_AT_ONCE)
    _gather(graph, buckets.gathered, places)
    stable_topological_sort(graph)
    return sum(map(len, [*sums, *buckets.gathered]))


@dataclass(frozen=True)
class Buckets:
    """Collectives that travel together, in the order in which they leave."""

    reduced: list[list[fx.Node]]
    scattered: list[list[fx.Node]]
    gathered: list[list[fx.Node]]


def find_buckets(graph: fx.Graph, megabytes: float | None) -> Buckets:
    """Return the buckets of `send_in_buckets`; the graph is not changed."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    sums = sorted(_gradient_sums(graph), key=lambda node: places[_source(node)])
    order = {node: place for place, node in enumerate(sums)}
    gathers = sorted(_parameter_gathers(graph), key=lambda node: places[_needed(node)])

    def of_kind(target: Any) -> list[list[fx.Node]]:
        buckets = _buckets([x for x in sums if x.target is target], megabytes)
        return sorted(buckets, key=lambda bucket: order[bucket[-1]])

    return Buckets(
        reduced=of_kind(c10d.all_reduce.default),
        scattered=of_kind(c10d.reduce_scatter_tensor.default),
        gathered=_buckets(gathers, megabytes),
    )


def _sum(
    graph: fx.Graph,
    buckets: list[list[fx.Node]],
    moving: set[fx.Node],
    at_once: int | None,
) -> None:
    (end,) = graph.find_nodes(op="output")
    leaves = [_after(_source(bucket[-1]), moving) for bucket in buckets]
    first_wait = end  # of the waits at the end, after what leaves last
    for number, bucket in enumerate(buckets):
        later = len(buckets) if at_once is None else number + at_once
        wait_at = leaves[later] if later < len(buckets) else end
        leave = first_wait if leaves[number] is end else leaves[number]
        wait = _merge(graph, bucket, leave, wait_at)
        if wait_at is end and first_wait is end:
            first_wait = wait


def _gather(
    graph: fx.Graph, buckets: list[list[fx.Node]], places: dict[fx.Node, int]
) -> None:
    needed = [_needed(bucket[0]) for bucket in buckets]
    # From the last one, so that at one place they leave before another is waited for.
    for number, bucket in reversed(list(enumerate(buckets))):
        leave = needed[max(number - _AHEAD, 0)]
        for before in (x for gather in bucket for x in _made_of_input(gather) or ()):
            if places[before] > places[leave]:
                leave.prepend(before)
        _merge(graph, bucket, leave, needed[number])


def _buckets(nodes: list[fx.Node], megabytes: float | None) -> list[list[fx.Node]]:
    """Group collectives of one group and dtype into buckets of `megabytes`.

    A bucket is open until it has that size; buckets are in the order of their first
    collectives. So there are at most bytes / limit + 1 buckets of each kind, as in
    DistributedDataParallel, and the collectives that have that size by themselves.
    These travel alone: Inductor makes the memory of a bucket when its first gradient is
    there, so that the bucket of a table [V, D] would take memory during all of the
    backward.
    """
    if megabytes is None:
        share = sum(map(_bytes, nodes)) / 1e6 / _BUCKETS_PER_GRAPH
        megabytes = min(max(share, _SMALLEST_MEGABYTES), _LARGEST_MEGABYTES)
    buckets: list[list[fx.Node]] = []
    open_ones: dict[Any, tuple[list[fx.Node], int]] = {}
    for node in nodes:
        value = node.meta["val"]
        if _bytes(node) >= megabytes * 1e6:
            buckets.append([node])
            continue
        kind = (node.args[1:], value.dtype, value.device)
        bucket, size = open_ones.get(kind, ([], 0))
        if not bucket or size >= megabytes * 1e6:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(node)
        open_ones[kind] = (bucket, size + _bytes(node))
    return buckets


def _bytes(collective: fx.Node) -> int:
    """Return the bytes of the whole tensor, which is as large on every rank."""
    values = (node.meta["val"] for node in (collective, _source(collective)))
    return max(int(value.numel()) * int(value.element_size()) for value in values)


def _merge(
    graph: fx.Graph, bucket: list[fx.Node], leave: fx.Node, wait_at: fx.Node
) -> fx.Node:
    """Make one collective before `leave`; return its wait, before `wait_at`."""
    if len(bucket) == 1:
        (node,) = bucket
        wait = _wait(node)
        if leave is not node:
            leave.prepend(node)
        if wait_at is not wait:
            wait_at.prepend(wait)
        return wait
    merge, mode = _MERGING[bucket[0].target]
    kind = getattr(inductor_config, mode, None)
    places = {"insert_before": leave, "wait_insertion_point": wait_at}
    in_one_call = any(map(_is_of_function, bucket))
    nodes: list[fx.Node] = getattr(bucketing, merge)(graph, bucket, kind, **places)[0]
    if in_one_call:
        _fill_in_one_call(nodes)
    return next(node for node in nodes if node.target is c10d.wait_tensor.default)


def _is_of_function(collective: fx.Node) -> bool:
    """Tell whether a function of repeated blocks has computed what is sent."""
    call = torch.ops.higher_order.invoke_subgraph
    source = _source(collective)
    while source.op == "call_function" and source.target is not call:
        if len(source.all_input_nodes) != 1:
            return False
        source = _source(source)
    return source.op == "call_function"


def _fill_in_one_call(merged: list[fx.Node]) -> None:
    """Join gradients by an operator of ours, and sum over ranks where it puts them."""
    for node in merged:
        users = list(node.users)
        if node.target is aten.cat.default and users:
            (reduction,) = users
            assert reduction.target is c10d.all_reduce.default
            node.target = torch.ops.cp.gradient_bucket.default
            reduction.target = c10d.all_reduce_.default


def _gradient_sums(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield sums over ranks from which only results of the graph are made."""
    for target in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default):
        for node in graph.find_nodes(op="call_function", target=target):
            is_computed = _source(node).op == "call_function"
            if is_computed and _has_wait(node) and _ends_the_graph(_wait(node)):
                yield node


def _ends_the_graph(wait: fx.Node) -> bool:
    todo, visited = [wait], {wait}
    while todo:
        for user in todo.pop().users:
            if user.op == "output" or user in visited:
                continue
            other_inputs = set(user.all_input_nodes) - visited
            is_computed = any(n.op == "call_function" for n in other_inputs)
            if is_computed or _exchanges(user):
                return False
            visited.add(user)
            todo.append(user)
    return True


def _parameter_gathers(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield gathers of an input of the graph, or of what is made of one alone."""
    target = c10d.all_gather_into_tensor.default
    for node in graph.find_nodes(op="call_function", target=target):
        used = _has_wait(node) and any(u.op != "output" for u in _wait(node).users)
        if used and _made_of_input(node) is not None:
            yield node


def _made_of_input(gather: fx.Node) -> list[fx.Node] | None:
    """Return the calls from one input to a gather; None if there is more.

    They are a cast, or padding that one rank has alone.
    """
    calls: list[fx.Node] = []
    node = _source(gather)
    while node.op == "call_function":
        if len(node.all_input_nodes) != 1 or _exchanges(node):
            return None
        calls.insert(0, node)
        node = _source(node)
    return calls if node.op == "placeholder" else None


def _exchanges(node: fx.Node) -> bool:
    is_collective = getattr(node.target, "namespace", None) == "_c10d_functional"
    return is_collective or communicates(node.target)


def _source(collective: fx.Node) -> fx.Node:
    return collective.all_input_nodes[0]


def _after(node: fx.Node, moving: set[fx.Node]) -> fx.Node:
    """Return the next node that stays where it is."""
    following = node.next
    while following in moving:
        following = following.next
    return following


def _has_wait(collective: fx.Node) -> bool:
    users = list(collective.users)
    return len(users) == 1 and users[0].target is c10d.wait_tensor.default


def _wait(collective: fx.Node) -> fx.Node:
    (wait,) = collective.users
    return wait


def _needed(gather: fx.Node) -> fx.Node:
    """Return the node that reads a gathered parameter first."""
    users = set(_wait(gather).users)
    node = gather.next
    while node not in users:
        node = node.next
    return node
