"""Let a pass of ours choose what a forward saves for its backward.

AOTAutograd's partitioner has a setting for that, `activation_memory_budget`, which is a
fraction of sizes that contain the parameters, saved or not: with a large embedding it
has no effect. It may also compute attention and its messages again. So its parts are
used here one by one: the minimum cut, the estimate of run times and the knapsack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch.fx as fx

# Private: the partitioner of AOTAutograd, seen in 2.13.
from torch._functorch import config, partitioners
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack
from torch.utils._mode_utils import no_dispatch
from torch.utils.checkpoint import CheckpointPolicy

_MAY_SEND = ("cp", "_c10d_functional")
_UNREACHED = 10**9  # what partitioners.py sets as dist_from_bw, far from a backward


class Partitioner:
    """Questions to torch about one joint graph.

    `fastest`, `fused`, `cheap` and `with_again` answer with values to save, from which
    the backward can be computed.
    """

    def __init__(self, graph: fx.Graph, info: Any) -> None:
        self.graph = graph
        self._info = info

    @property
    def forward(self) -> frozenset[fx.Node]:
        """Calls that the results of the forward need."""
        return frozenset(self._info.required_fw_nodes)

    @property
    def backward(self) -> list[fx.Node]:
        """Calls that depend on gradients of results."""
        return [x for x in self._info.tangents_closure if x.op == "call_function"]

    def fastest(self) -> list[fx.Node]:
        """Return what torch saves without a budget."""
        return self._cut(self._options())[0]

    def fused(self) -> list[fx.Node]:
        """Return what to save where recomputation need not be fused.

        The backward then computes again also what its kernels cannot fuse.
        """
        return self._cut(self._options(fuse=False))[0]

    def cheap(self) -> list[fx.Node]:
        """Return what to save where all that is no product is computed again.

        What a tag keeps is saved, too.
        """
        return self._cut(self._options(fuse=False, listed=False))[0]

    def costly(self) -> list[fx.Node]:
        """Return calls that `cheap` does not compute again, and that could be."""
        banned = self._cut(self._options(fuse=False, listed=False))[1]
        calls = [x for x in banned if x.op == "call_function"]
        candidates = [x for x in calls if not is_kept(x) and _is_near(x)]
        return sorted(
            candidates, key=lambda x: (-size_of(x), self._info.get_fw_order(x))
        )

    def with_again(self, nodes: Collection[fx.Node]) -> list[fx.Node]:
        """Return `cheap`, but with `nodes` computed again where that saves memory."""
        return self._cut(self._options(fuse=False, listed=False), nodes)[0]

    @functools.cached_property
    def _solved(self) -> dict[Any, tuple[list[fx.Node], Collection[fx.Node]]]:
        return {}

    def _options(self, fuse: bool = True, listed: bool = True) -> Any:
        return partitioners.MinCutOptions(
            ban_if_used_far_apart=config.ban_recompute_used_far_apart and fuse,
            ban_if_long_fusible_chains=(
                config.ban_recompute_long_fusible_chains and fuse
            ),
            ban_if_materialized_backward=(
                config.ban_recompute_materialized_backward and fuse
            ),
            ban_if_not_in_allowlist=config.ban_recompute_not_in_allowlist and listed,
            ban_if_reduction=config.ban_recompute_reductions,
        )

    def _cut(
        self, options: Any, again: Collection[fx.Node] = ()
    ) -> tuple[list[fx.Node], Collection[fx.Node]]:
        kept_nodes = frozenset(filter(is_kept, self.graph.nodes))
        key = (repr(options), frozenset(again), kept_nodes)
        if key not in self._solved:
            allowed = partitioners.OrderedSet(again)
            self._solved[key] = partitioners.solve_min_cut(
                self.graph, self._info, options, allowed
            )
        return self._solved[key]


def keep(node: fx.Node) -> None:
    """Never compute a call again, unless a checkpoint region of the user does."""
    if not partitioners.must_recompute(node):
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def let_go(node: fx.Node) -> None:
    """Undo `keep`."""
    if is_kept(node):
        del node.meta["recompute"]


def is_kept(node: fx.Node) -> bool:
    """Tell whether a call is never computed again."""
    return bool(node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE)


def offload(node: fx.Node) -> None:
    """Have torch move a saved value to the host, where it can: it moves no items."""
    node.meta["should_offload"] = True


def size_of(node: fx.Node) -> int:
    """Return the bytes of what a call makes; of a symbolic size, the expected ones."""
    return int(partitioners._size_of(node))


def slowest_to_repeat(nodes: Sequence[fx.Node], room: int) -> list[fx.Node]:
    """Choose calls whose results fit into `room` bytes and cost most time to repeat."""
    total = sum(map(size_of, nodes))
    if not nodes or room <= 0 or not total:
        return []
    sizes = [size_of(x) / total for x in nodes]
    times = [_flops(x) for x in nodes]
    with no_dispatch():
        _, saved, _ = dp_knapsack(sizes, times, min(room / total, 1.0))
    return [nodes[i] for i in saved]


def _flops(node: fx.Node) -> float:
    return float(partitioners.estimate_runtime(node))


def _is_near(node: fx.Node) -> bool:
    distance: int = node.dist_from_bw  # type: ignore[attr-defined]  # torch sets it
    return distance < _UNREACHED


Choose = Callable[[Partitioner], list[fx.Node]]

_choose: ContextVar[Choose | None] = ContextVar("choose_saved_values", default=None)


@functools.cache
def install() -> None:
    """Ask our pass in the place of torch's choice, where there is one."""
    original = partitioners.choose_saved_values_set

    @functools.wraps(original)
    def choose(
        joint_graph: fx.Graph, node_info: Any, memory_budget: float = 1
    ) -> list[fx.Node]:
        _send_in_forward(joint_graph, node_info)
        ours = _choose.get()
        if ours is None:
            return original(joint_graph, node_info, memory_budget)
        return ours(Partitioner(joint_graph, node_info))

    partitioners.choose_saved_values_set = choose


def _send_in_forward(graph: fx.Graph, info: Any) -> None:
    """Leave no message that needs no gradient to the backward, on any rank.

    Sizes decide which part makes what the backward alone reads; they differ by rank.
    """
    early: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in info.tangents_closure or info.is_required_fw(node):
            continue
        sends = getattr(node.target, "namespace", None) in _MAY_SEND
        if sends or not early.isdisjoint(node.users):
            early.add(node)
    if not early:
        return
    info.unclaimed_nodes -= early
    info._required_fw_nodes |= early
    forward = (node for node in graph.nodes if info.is_required_fw(node))
    info.fw_order = {node: number for number, node in enumerate(forward)}
    vars(info).pop("required_fw_nodes", None)  # it is cached


@contextmanager
def chosen_by(choose: Choose | None) -> Iterator[None]:
    """Let `choose` decide what graphs that are compiled inside save; None leaves it."""
    token = _choose.set(choose)
    try:
        yield
    finally:
        _choose.reset(token)
