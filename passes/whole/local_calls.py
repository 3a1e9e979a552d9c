"""What one call of the whole program is on this rank: a small graph of local calls.

A call runs once on fake DTensors, and what DTensor calls on local tensors is traced.
That depends on the call, on where its operands lie and on their sizes, so that a model
of 48 equal layers runs no more calls than one of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.fx.experimental.proxy_tensor import make_fx

from cpcompile.errors import RewriteError
from cpcompile.geometry.lengths import hashable, is_same, is_symbol
from cpcompile.ops import by_rows, window_convolution
from cpcompile.ops.dtensor.dtensor_rules import ranks_of
from cpcompile.torch_private import pytree
from cpcompile.torch_private.distributed import DTensorSpec, TensorMeta
from cpcompile.torch_private.fake_tensors import detect_fake_mode

from ..flow.trial import MisreadRules, must_not_wait, untrue
from ..graph.constant_arguments import MeshAxis
from ..graph.local_notes import NOTES
from .composition_rules import gradient_of_calls

_DECOMPOSED: dict[Any, Callable[..., Any]] = {
    **window_convolution.DECOMPOSED,
    **by_rows.DECOMPOSED,
}
_DETACH = torch.ops.aten.detach.default
_SUM = torch.ops._c10d_functional.all_reduce.default
_MESSAGES = ("_c10d_functional", "_dtensor")
Decompositions = Mapping[Any, Callable[..., Any]]


@dataclass(frozen=True)
class LocalCall:
    """A call on this rank.

    operands: the tensors among its arguments, in order. results: its values, DTensors
    or not, in `tree`. symbols: nodes of the sizes that are symbols, which `module`
    takes first.
    """

    module: fx.GraphModule
    operands: tuple[Tensor, ...]
    results: tuple[Any, ...]
    tree: pytree.TreeSpec
    symbols: tuple[fx.Node, ...] = ()

    @property
    def sends(self) -> bool:
        """Tell whether it takes a message of DTensor's."""
        targets = (node.target for node in self.module.graph.nodes)
        return any(getattr(x, "namespace", "") in _MESSAGES for x in targets)

    def brings_together(self, cp_axis: MeshAxis, but_for_sums: bool) -> bool:
        """Tell whether it brings entries of ranks of an axis together.

        An operator of ours may do so, or may count on their order.
        """
        together = {*dist.get_process_group_ranks(cp_axis.mesh.get_group(cp_axis.axis))}
        for node in self.module.graph.nodes:
            namespace = getattr(node.target, "namespace", "")
            if but_for_sums and node.target is _SUM:
                continue
            groups = (ranks_of(x) or () for x in node.args if isinstance(x, str))
            if namespace in _MESSAGES and any(
                len(together.intersection(ranks)) > 1 for ranks in groups
            ):
                return True
            if namespace == "cp":
                return True
        return False


class LocalCalls:
    """The calls of one graph, by what they depend on.

    table: how local calls are decomposed, as the compiler after this wants them.
    symbols: sizes of the graph that are symbols; all others are computed of them.
    runs, copies: how many calls were run, and how often one was met again.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        table: Decompositions,
        symbols: Mapping[fx.Node, torch.SymInt] | None = None,
    ) -> None:
        self.mesh, self.table = mesh, {**table, **_DECOMPOSED}
        self.symbols = symbols or {}
        self.runs = self.copies = 0
        self._known: dict[Any, LocalCall] = {}

    def of(self, call: Callable[..., Any], args: Any, kwargs: Any = {}) -> LocalCall:  # noqa: B006
        """Return what call(*args, **kwargs) is, for fake DTensors and plain values.

        Raises: whatever DTensor raises for a call that it cannot do.
        """
        leaves, tree = pytree.tree_flatten((args, kwargs))
        key = (call, tree, *map(_key, leaves))
        known = self._known.get(key)
        if known is None:
            self.runs += 1
            known = self._known[key] = self._traced(call, leaves, tree)
        else:
            self.copies += 1
        return known

    def _traced(
        self, call: Callable[..., Any], leaves: Sequence[Any], tree: pytree.TreeSpec
    ) -> LocalCall:
        found: list[Any] = []

        def run(*local: Any) -> list[Any]:
            parts = iter(local[len(self.symbols) :])
            given = [
                _with_local(x, next(parts)) if isinstance(x, Tensor) else x
                for x in leaves
            ]
            # What a composition saved may be local, and then stays so.
            is_composed = getattr(call, "func", None) is gradient_of_calls
            if not is_composed and any(isinstance(x, DTensor) for x in leaves):
                given = [self._countable(x) for x in given]
            args, kwargs = pytree.tree_unflatten(given, tree)
            misread = MisreadRules()  # type: ignore[no-untyped-call]
            with implicit_replication(), misread:
                given = call(*args, **kwargs)
            results, structure = pytree.tree_flatten(given)
            problem = misread.problem or untrue(given)
            if problem or any(map(_is_mean_of_parts, results)):
                raise RewriteError(problem or "parts of unequal sizes have other means")
            results = [_summed(x) if must_not_wait(x) else x for x in results]
            found[:] = results, structure
            return [_local(x) for x in results]

        operands = tuple(x for x in leaves if isinstance(x, Tensor))
        given = [_unshared(_local(x)) for x in operands]
        trace = make_fx(run, decomposition_table=self.table)
        try:
            module = trace(*self.symbols.values(), *given)
        except Exception:  # sizes that only data tells are of no call then
            mode = detect_fake_mode(given)
            if mode is not None and mode.shape_env is not None:
                mode.shape_env.pending_fresh_unbacked_symbols.clear()
            raise
        for node in module.graph.find_nodes(op="call_function", target=_DETACH):
            node.replace_all_uses_with(node.args[0])  # so that equal calls are one
            module.graph.erase_node(node)
        results, structure = found
        symbols = tuple(self.symbols)
        return LocalCall(module, operands, tuple(results), structure, symbols)

    def _countable(self, x: Any) -> Any:
        """Return x; a plain tensor of symbolic size, or of one entry, as a DTensor.

        DTensor asks plain tensors how many entries they have, and knows no symbols
        there; it warns of those with one in every call (seen in torch 2.13).
        """
        if not isinstance(x, Tensor) or isinstance(x, DTensor) or not x.ndim:
            return x
        is_one = all(is_same(n, 1) for n in x.shape)
        return replicated(x, self.mesh) if is_one or any(map(is_symbol, x.shape)) else x


def copied(
    call: LocalCall, operands: Sequence[fx.Node], graph: fx.Graph, like: fx.Node
) -> Any:
    """Copy the nodes of a call to where `graph` inserts; return those of its results.

    operands: the local nodes of its operands that are tensors, in order. like: the node
        on whose behalf they stand, whose notes they get.
    """
    notes = {key: like.meta[key] for key in NOTES if key in like.meta}
    remaining, new = iter((*call.symbols, *operands)), dict[fx.Node, Any]()
    for node in call.module.graph.nodes:
        if node.op == "placeholder":
            new[node] = next(remaining)
        elif node.op == "get_attr":
            new[node] = _constant(graph, getattr(call.module, str(node.target)))
        elif node.op == "call_function":
            new[node] = graph.node_copy(node, new.__getitem__)
            # Inductor names kernels after the original operator.
            original = like.meta.get("original_aten", node.target)
            new[node].meta.setdefault("original_aten", original)
            new[node].meta.update(notes)
    results: Any = call.module.graph.output_node().args[0]
    written = [new[x] if isinstance(x, fx.Node) else x for x in results]
    return pytree.tree_unflatten(written, call.tree)


def replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return x, which every rank has in whole, as a DTensor."""
    return placed(x, mesh, (Replicate(),) * mesh.ndim, x)


def placed(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], whole: Tensor
) -> DTensor:
    """Return the DTensor whose part here is `local`, with the sizes of `whole`."""
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _summed(x: DTensor) -> DTensor:
    """Combine the parts of x at once; Note [Sums that wait]."""
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements)


def _is_mean_of_parts(x: Any) -> bool:
    placements = x.placements if isinstance(x, DTensor) else ()
    return any(p.is_partial("avg") for p in placements)


def _constant(graph: fx.Graph, value: Any) -> fx.Node:
    owner = graph.owning_module
    assert owner is not None, "a graph that is compiled belongs to a module"
    if isinstance(value, torch.nn.Module):  # the step of a scan
        name = f"local_step_{sum(1 for _ in owner.children())}"
        owner.add_submodule(name, value)
        return graph.get_attr(name)
    # One tensor may have several names, of calls that are alike.
    names = dict(owner.named_buffers(remove_duplicate=False))
    name = f"local_constant_{len(names)}"
    owner.register_buffer(name, value, persistent=False)
    node = graph.get_attr(name)
    node.meta["val"] = value
    return node


def _local(x: Any) -> Any:
    return x._local_tensor if isinstance(x, DTensor) else x


def _unshared(x: Tensor) -> Tensor:
    """Return a tensor of its own like x.

    Results of calls that are alike are one fake tensor, and a tracer tells operands
    apart by identity: a product of two such results would be a square.
    """
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _with_local(x: Any, local: Tensor) -> Any:
    if isinstance(x, DTensor):
        return DTensor(local, x._spec, requires_grad=False)
    return local


def _key(x: Any) -> Any:
    """Return what a call depends on of an argument."""
    if not isinstance(x, Tensor):
        return type(x), str(x)
    local = _local(x)
    of_local = (*_sizes(local), local.dtype, local.device)
    if not isinstance(x, DTensor):
        return of_local
    # How a strided shard is read is not in its placement; torch 2.13.
    reads = getattr(x._spec, "use_strided_shard_as_shard_order", None)
    return x.placements, reads, *_sizes(x), *of_local


def _sizes(x: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(map(hashable, x.shape)), tuple(map(hashable, x.stride()))
