"""DTensors on other mesh axes, as tensor parallelism makes them.

    x.redistribute(placements)  ->  cp_whole.move(x's local part, plan)

AOTAutograd traces the user's DTensors by the rules of DTensor on their own mesh: what
it sees of each is the local part, as on a rank of a tensor parallel model without us,
and where DTensor moves it, forward or backward, one call. So a graph has all tokens,
and this rank's heads. Its values are placed on the axis of the sequence alone. A move
of tensors of which every rank has its tokens is a move of these tokens.

Note [Token chunks]
With sequence parallelism a rank t of the other axes has the t-th chunk of the tokens.
To share it out over our axis a rank would exchange tokens at every such move. Instead
it takes the chunk that DTensor's placements [Shard(1), Shard(1)] give it, the t-th of
the tokens that it has. As long as calls treat all tokens alike, which `flow` proves,
nobody can tell. Before any other call a chunk is brought in order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

# Where DTensor calls redistribute, and the sum of a look-up in a table that ranks share
# out; seen in 2.13.
from torch.distributed.tensor import _api as dtensor_api
from torch.distributed.tensor.placement_types import _MaskPartial

from cpcompile.errors import RewriteError
from cpcompile.geometry.layout import TokenLayout
from cpcompile.ops.dtensor.local_part import contiguous_strides, dtensor_of
from cpcompile.ranks.parameter_meshes import check_other_axes
from cpcompile.torch_private.distributed import (
    DTensorSpec,
    TensorMeta,
    compute_local_shape_and_global_offset,
    dtensor_dispatch,
    dtensor_redistribute,
)
from cpcompile.torch_private.fake_tensors import disable_current_modes

from ..flow.flow import EntriesMeet, nothing_moves
from ..graph.constant_arguments import MeshAxis
from ..graph.context import Context, InputKind, OutputPlacement
from ..graph.nodes import concrete_layout, fake_value, output_nodes
from ..graph.sequence_tokens import TokenDim
from .local_calls import replicated
from .token_order import in_natural_order, in_order

_redistribute = dtensor_redistribute.redistribute_local_tensor


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The axes of a mesh, beside that of the sequence, that share out the tokens."""

    mesh: DeviceMesh
    axes: tuple[int, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Chunks:
        """Return those of all axes of a mesh."""
        return cls(mesh, tuple(range(mesh.ndim)))

    def placements(self, dim: int) -> list[Placement]:
        """Return the placements of a chunk on that mesh."""
        return [
            Shard(dim) if axis in self.axes else Replicate()
            for axis in range(self.mesh.ndim)
        ]

    @property
    def count(self) -> int:
        return math.prod(self.mesh.size(axis) for axis in self.axes)

    def gathered(self, chunk: Tensor, dim: int) -> Tensor:
        """Return what this chunk is of."""
        shape = list(chunk.shape)
        shape[dim] *= self.count
        everywhere = [Replicate()] * self.mesh.ndim
        plan = Plan.of(self.mesh, shape, self.placements(dim), everywhere)
        return plan.run(chunk, shape)

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's chunk."""
        everywhere = [Replicate()] * self.mesh.ndim
        plan = Plan.of(self.mesh, x.shape, everywhere, self.placements(dim))
        return plan.run(x, x.shape)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A move on other axes: specifications of a DTensor before and after it."""

    before: DTensorSpec
    after: DTensorSpec

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        shape: Sequence[int],
        before: Sequence[Placement],
        after: Sequence[Placement],
    ) -> Plan:
        meta = TensorMeta(torch.Size(shape), contiguous_strides(shape), torch.float)  # type: ignore[arg-type]
        specs = (DTensorSpec(mesh, tuple(p), tensor_meta=meta) for p in (before, after))
        return cls(*specs)

    @property
    def shape(self) -> torch.Size:
        return self.before.shape

    @property
    def adds(self) -> bool:
        """Tell whether it is linear, as everything but a maximum is."""
        sums = ("sum", "avg")
        return all(
            getattr(p, "reduce_op", "sum") in sums for p in self.before.placements
        )

    def chunks(self, spec: DTensorSpec, dim: int) -> Chunks | None:
        """Return how a dimension is shared out before or after it."""
        axes = [i for i, p in enumerate(spec.placements) if p == Shard(dim)]
        return Chunks(spec.mesh, tuple(axes)) if axes else None

    def text(self) -> str:
        groups = [group.group_name for group in self.before.mesh.get_all_groups()]
        specs = (self.before, self.after)
        moves = [(x.placements, x.use_strided_shard_as_shard_order) for x in specs]
        return f"{groups} {moves} {tuple(self.shape)}"

    def run(self, local: Tensor, shape: Sequence[int]) -> Tensor:
        """Move the local part of a tensor of this shape."""
        size = torch.Size(shape)
        meta = TensorMeta(size, contiguous_strides(size), local.dtype)
        before, after = (
            dataclasses.replace(x, tensor_meta=meta) for x in (self.before, self.after)
        )
        return _redistribute(local, before, after)


_plans: dict[str, Plan] = {}  # by their text


@torch.library.custom_op("cp_whole::move", mutates_args=())
def move(x: Tensor, plan: str) -> Tensor:
    """Move the local part of a DTensor on other axes; `plan` is the text of a Plan."""
    return _plans[plan].run(x, _plans[plan].shape)


@move.register_fake
def _(x: Tensor, plan: str) -> Tensor:
    after = _plans[plan].after
    with disable_current_modes():  # it makes tensors, which are not to be fake
        shape, _ = compute_local_shape_and_global_offset(
            after.shape, after.mesh, after.placements
        )
    return x.new_empty(shape)


MOVE = torch.ops.cp_whole.move.default


@contextmanager
def moves_are_calls(ours: DeviceMesh) -> Iterator[None]:
    """Have DTensor call `cp_whole.move` for moves on other meshes than ours."""

    def moved(
        x: Tensor, before: DTensorSpec, after: DTensorSpec, **options: Any
    ) -> Tensor:
        before, after = _on_real_mesh(before), _on_real_mesh(after)
        if before.mesh == ours or before.placements == after.placements:
            return _redistribute(x, before, after, **options)
        if any(isinstance(p, _MaskPartial) for p in after.placements):
            return _look_up_own(x, after)
        placements = [
            Partial(p.reduce_op) if isinstance(p, _MaskPartial) else p
            for p in before.placements
        ]
        for p in before.placements:
            if isinstance(p, _MaskPartial):
                x = _without_others(x, p)
        plan = Plan(dataclasses.replace(before, placements=tuple(placements)), after)
        _plans[plan.text()] = plan
        return MOVE(x, plan.text())  # type: ignore[no-any-return]

    with ExitStack() as stack:
        for module in (dtensor_api, dtensor_dispatch, dtensor_redistribute):
            name = "redistribute_local_tensor"
            stack.enter_context(mock.patch.object(module, name, moved))
        yield


def _on_real_mesh(spec: DTensorSpec) -> DTensorSpec:
    """Return a specification that names the mesh; AOTAutograd has another object."""
    mesh = getattr(spec.mesh, "real_obj", spec.mesh)
    return spec if mesh is spec.mesh else dataclasses.replace(spec, mesh=mesh)


def _look_up_own(ids: Tensor, after: DTensorSpec) -> Tensor:
    """Return ids as rows of this rank's part of a table; those of other parts are 0."""
    for axis, p in enumerate(after.placements):
        if isinstance(p, _MaskPartial):
            rows, begin = Shard.local_shard_size_and_offset(
                p.offset_shape[p.offset_dim],  # type: ignore[index]
                after.mesh.size(axis),
                after.mesh.get_local_rank(axis),
            )
            others = (ids < begin) | (ids >= begin + rows)
            p.mask_buffer.materialize_mask(others)
            ids = (ids - begin).masked_fill(others, 0)
    return ids


def _without_others(x: Tensor, p: _MaskPartial) -> Tensor:
    """Return what was looked up, with zeros for rows that other ranks have."""
    others = p.mask_buffer.data
    assert others is not None, "what is looked up has a mask"
    p.mask_buffer.release_mask()
    return x.masked_fill(others if x.ndim == others.ndim else others[..., None], 0)


# Edges


def enter_other_axes(graph: fx.Graph, ctx: Context) -> None:
    """Let inputs and results on other axes enter and leave by their local parts.

    Results that are DTensors of the user outside are noted in `findings.outputs`.
    """
    last = next(reversed(graph.find_nodes(op="placeholder")), None)
    for node, known in ctx.inputs.items():
        if known.kind is InputKind.OTHER_AXES:
            value = fake_value(node)
            check_other_axes(_sequence(ctx), value.device_mesh)
            axis, layout = MeshAxis(value.device_mesh), concrete_layout(value)
            with graph.inserting_after(last):
                last = graph.call_function(_entered)
            node.replace_all_uses_with(last)
            args: Any = (node, axis, value.placements, *layout)
            last.args = args
            last.meta["example_value"] = value
            node.meta["example_value"] = value.to_local()
    results: list[Any] = list(output_nodes(graph))
    outputs = ctx.findings.outputs
    outputs[:] = [None] * len(results)
    for place, node in enumerate(results):
        value = fake_value(node)
        if isinstance(value, DTensor) and value.device_mesh != ctx.mesh:
            whole = [Replicate() if p.is_partial() else p for p in value.placements]
            placements, mesh = tuple(whole), value.device_mesh
            layout = concrete_layout(value)
            outputs[place] = OutputPlacement(placements, *layout, mesh=mesh)
            with graph.inserting_before(graph.output_node()):
                args = (node, placements)
                results[place] = graph.call_function(_left, args)
            results[place].meta = {"example_value": value.to_local()}
    graph.output_node().args = (tuple(results),)


def _sequence(ctx: Context) -> DeviceMesh:
    """Return the mesh of the sequence axis alone."""
    names = ctx.mesh.mesh_dim_names
    if ctx.mesh.ndim == 1 or names is None:
        return ctx.mesh
    return ctx.mesh[names[ctx.axis]]


def _entered(
    x: Tensor,
    axis: MeshAxis,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
) -> DTensor:
    return dtensor_of(x, axis.mesh, placements, shape, stride)


def _left(x: DTensor, placements: tuple[Placement, ...]) -> Tensor:
    return x.redistribute(placements=placements).to_local()


# Calls on this rank's tokens


def chunks_after(
    x: DTensor, text: str, ranks: int, chunks: Chunks | None
) -> tuple[bool, Chunks | None]:
    """Say whether a move of x is one of this rank's tokens, and what it makes of them.

    chunks: what x is of. Returns: (whether it is, what the result is of).
    """
    (placement,), plan = x.placements, _plans[text]
    dim = getattr(placement, "dim", None)
    if dim is None:
        return True, None
    before, after = (plan.chunks(spec, dim) for spec in (plan.before, plan.after))
    if before != chunks:
        return False, None
    if before is None and after is None:
        return not any(
            getattr(p, "dim", None) == dim for p in plan.before.placements
        ), None
    counts = [ranks * part.count for part in (before, after) if part is not None]
    even = type(placement) is Shard and not any(plan.shape[dim] % n for n in counts)
    return even, after if even else None


def moved(x: Any, text: str, chunks: Chunks | None) -> Any:
    """Run a move on the tokens of this rank, or else on all of them."""
    plan = _plans[text]
    if not isinstance(x, DTensor):
        return plan.run(x, plan.shape)
    mesh, (placement,) = x.device_mesh, x.placements
    if placement.is_partial() and not plan.adds:
        return moved(x.redistribute(placements=[Replicate()]), text, None)
    is_local, after = chunks_after(x, text, mesh.size(), chunks)
    if not is_local:
        whole = x.redistribute(placements=[Replicate()])._local_tensor
        result = replicated(plan.run(whole, plan.shape), mesh)
        return result.redistribute(placements=[Shard(placement.dim)])  # type: ignore[attr-defined]
    shape, dim = list(plan.shape), getattr(placement, "dim", None)
    if dim is not None:
        shape[dim] = x._local_tensor.shape[dim] * (chunks.count if chunks else 1)
    local = plan.run(x._local_tensor, shape)
    size = list(local.shape)
    if dim is not None:
        size[dim] = plan.shape[dim] // (after.count if after else 1)
    meta = TensorMeta(torch.Size(size), contiguous_strides(torch.Size(size)), x.dtype)
    spec = dataclasses.replace(x._spec, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def chunk_in_order(
    x: DTensor, chunks: Chunks, tokens: TokenLayout | None = None
) -> DTensor:
    """Return a chunk in order, on every rank; Note [Token chunks].

    tokens: of the whole sequence, if they are laid out.
    """
    (placement,) = x.placements
    if not isinstance(placement, Shard):
        raise RewriteError(
            f"batch and tokens are flattened where {chunks.mesh.mesh_dim_names} shares "
            f"out the tokens, and a call needs them in order; got {placement}, needed "
            "tokens that have a dimension of their own: flatten after they are gathered"
        )
    dim, mesh = placement.dim, x.device_mesh
    shape = list(x.shape)
    shape[dim] *= chunks.count
    own = dtensor_of(chunks.gathered(x._local_tensor, dim), mesh, [placement], shape)
    whole = own.redistribute(placements=[Replicate()])
    if tokens is not None:
        whole = in_natural_order(whole, TokenDim(dim), tokens)
    return replicated(chunks.cut(whole._local_tensor, dim), mesh)


def order_in_chunks(
    x: DTensor, dim: int, chunks: Chunks, tokens: TokenLayout | None = None
) -> DTensor:
    """Return, of a chunk in order on every rank, what this rank has.

    It is the inverse of chunk_in_order. dim: of the tokens.
    """
    mesh, to = x.device_mesh, [Shard(dim)]
    whole = replicated(chunks.gathered(x._local_tensor, dim), mesh)
    if tokens is not None:
        whole = in_order(whole, TokenDim(dim), tokens)
    own = whole.redistribute(placements=to)._local_tensor
    return dtensor_of(chunks.cut(own, dim), mesh, to, x.shape)


class TokenWise:
    """Calls that raise EntriesMeet unless they treat all tokens alike; one per call."""

    def __init__(self) -> None:
        self._calls: dict[Any, Callable[..., Any]] = {}

    def of(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def alike(*args: Any, **options: Any) -> Any:
            with nothing_moves() as moves:
                result = call(*args, **options)
            if moves.cut or moves.ends_sums:
                raise EntriesMeet
            return result

        return self._calls.setdefault(call, alike)
