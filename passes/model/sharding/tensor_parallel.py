"""Decide on the DTensors of tensor parallelism in the user's model.

    DTensor.from_local(x, tp, [p])   ->  cp_tp_lift(x, [p])
    linear(x, weight)                ->  the same, on the joint mesh
    y.redistribute(placements=[p])   ->  cp_tp_move(y, [p])
    y.to_local()                     ->  cp_tp_lower(y)

See Note [Tensor parallelism] and Note [Tokens that tp shards] in joint_calls.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from cpcompile.errors import RewriteError
from cpcompile.refusals import check_refusal
from cpcompile.torch_private import pytree
from cpcompile.torch_private.fake_tensors import enable_python_dispatcher

from ...flow.flow import nothing_moves
from ...graph.effects import is_in_place
from ...graph.mesh_changes import MeshChange, mesh_change
from ...graph.new_call import NewCall, with_inputs
from ...graph.nodes import expected_shape, fake_value, where
from ...graph.origins import origin
from ...placement.decisions import (
    Alias,
    Decision,
    Replace,
    RewriteCall,
    RunOnTokenChunks,
    Write,
)
from ...placement.graph_values import GraphValues
from ...placement.joint_calls import (
    JointMesh,
    cp_tp_lift,
    cp_tp_lower,
    cp_tp_move,
    cp_tp_regular,
    cp_tp_share,
)
from ...placement.placement_calls import cp_place, cp_shard
from ..mutation.write_rules import in_place


def on_other_axes(known: GraphValues, node: fx.Node) -> Decision | None:
    """Decide on a call that reads or makes DTensors on other axes; None for others.

    Raises: RewriteError for a call that makes such DTensors in another way.
    """
    change = mesh_change(node)
    if change is MeshChange.FROM_LOCAL:
        return _from_local(known, node)
    joint = known.joint_of(node)
    if joint is None:
        _refuse_other_sources(known, node)
        return None
    if change is MeshChange.REDISTRIBUTE:
        _refuse_others(node, {"device_mesh", "placements", "async_op"})
        placements = fake_value(node).placements
        (x,) = (x for x in node.all_input_nodes if known.is_joint(known.value(x)))
        return Replace(NewCall(cp_tp_move, (x, placements)))
    if change is MeshChange.TO_LOCAL:
        return _to_local(known, node, joint)
    if _has_dtensors(fake_value(node)):
        return None  # a call on DTensors like any other
    return _on_chunks(known, node, joint)


def _from_local(known: GraphValues, node: fx.Node) -> Decision:
    dtensor = fake_value(node)
    placements = dtensor.placements
    joint = known.joint_with(dtensor.device_mesh)
    (x, *_), value = node.args, known.value(node.args[0])
    assert isinstance(x, fx.Node)
    _refuse_others(node, {"device_mesh", "placements", "run_check"})
    if known.is_joint(value):
        if value.placements[1:] == placements:
            return Replace(x)
        regular = NewCall(cp_tp_regular, (x, known.cp_axis))
        lift = (regular, joint.joint, known.cp_axis, placements)
        return Replace(NewCall(cp_tp_lift, lift))
    source: Any = known.sharded_ids.get(x, x)
    dims = {p.dim for p in placements if isinstance(p, Shard)}
    first = value.placements[known.ctx.axis] if isinstance(value, DTensor) else None
    if isinstance(first, Shard) and first.dim in dims:
        # Chunks of the chunks of tp; DTensor cuts the other way round.
        whole = (Replicate(),)
        source, first = NewCall(cp_place, (x, known.cp_axis, whole)), None
    lifted = NewCall(cp_tp_lift, (source, joint.joint, known.cp_axis, placements))
    dim = known.sequence_dims.get(node) or known.sequence_dims.get(x)
    cut = source is x and (first is None or first.is_replicate())
    if (
        (cut or source is not x)
        and dim is not None
        and dim.outer == 1
        and (x not in known.sharded_ids)
    ):
        lifted = NewCall(cp_shard, (lifted, known.cp_axis, dim.dim))
    return Replace(lifted)


def _to_local(known: GraphValues, node: fx.Node, joint: JointMesh) -> Decision:
    _refuse_others(node, {"grad_placements"})
    x = node.all_input_nodes[0]
    grad_placements: Any = node.kwargs.get("grad_placements")
    if not _are_chunks(known.value(x)):
        return Replace(NewCall(cp_tp_lower, (x, known.cp_axis, grad_placements)))
    if (
        grad_placements is not None
        and tuple(grad_placements) != known.value(x).placements[1:]
    ):
        raise RewriteError(
            f"{node.name} at {where(node)} takes chunks of tokens whose gradient has "
            f"the placements {tuple(grad_placements)}; needed those of the tokens: "
            "leave grad_placements away"
        )
    return Alias(x)


def _refuse_others(node: fx.Node, supported: set[str]) -> None:
    """Raise RewriteError for arguments that would be ignored."""
    unsupported = {k for k, x in node.kwargs.items() if x is not None} - supported
    positional = 3 if mesh_change(node) is MeshChange.FROM_LOCAL else 1
    if unsupported or len(node.args) > positional:
        raise RewriteError(
            f"{node.name} at {where(node)} is given {sorted(unsupported) or 'more'}; "
            f"needed these arguments alone, by name: {', '.join(sorted(supported))}"
        )


def _on_chunks(known: GraphValues, node: fx.Node, joint: JointMesh) -> Decision:
    """Decide on a call on chunks of the tokens that is plain to Dynamo."""
    if is_in_place(node):
        written = in_place(known, node)
        call = getattr(getattr(written, "decision", None), "call", None)
        if isinstance(written, Write) and isinstance(call, NewCall):
            shared = _shared(known, joint, call)
            if shared is not None and _is_token_wise(known, node, joint, call):
                return Write(written.base, RunOnTokenChunks(shared))
        raise RewriteError(
            f"{node.name} at {where(node)} writes into tokens that are sharded over "
            f"{list(joint.joint.mesh.mesh_dim_names or ())}; needed a call that "
            "returns a new tensor"
        )
    call = NewCall(node.target, node.args, node.kwargs)
    shared = _shared(known, joint, call)
    if origin(node) in known.ctx.findings.fallback_calls:
        shared = None
    if shared is not None and _is_token_wise(known, node, joint, call):
        return RunOnTokenChunks(shared)

    def regular(x: fx.Node) -> fx.Node | NewCall:
        joint_value = known.is_joint(known.value(x))
        return NewCall(cp_tp_regular, (x, known.cp_axis)) if joint_value else x

    return RewriteCall(with_inputs(node, regular))


def _shared(known: GraphValues, joint: JointMesh, call: NewCall) -> NewCall | None:
    """Put plain tensors of a call on the joint mesh; None where it has other values."""
    odd = False

    def shared(x: Any) -> Any:
        nonlocal odd
        odd |= isinstance(x, NewCall)
        if not isinstance(x, fx.Node):
            return x
        value = known.value(x)
        odd |= isinstance(value, DTensor) and not known.is_joint(value)
        plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        return NewCall(cp_tp_share, (x, joint.joint)) if plain else x

    args, kwargs = fx.node.map_aggregate((call.args, dict(call.kwargs)), shared)
    return None if odd else NewCall(call.target, args, kwargs)


def _is_token_wise(
    known: GraphValues, node: fx.Node, joint: JointMesh, call: NewCall
) -> bool:
    """Tell whether a call on whole sequences is right for each chunk.

    A chunk of its result has to be what the call on the chunk gives.
    """
    args, kwargs = pytree.tree_map_only(
        Tensor,
        lambda x: (
            x
            if isinstance(x, DTensor)
            else known.trial.must_run(cp_tp_share, (x, joint.joint), {})
        ),
        known.value((call.args, dict(call.kwargs))),
    )
    target = call.target
    if target == node.target:
        target = known.callable(node)
    try:
        with (
            nothing_moves() as moves,
            known.trial.fake_mode,
            enable_python_dispatcher(),
            torch.no_grad(),
        ):
            result = target(*args, **kwargs)
    except Exception as error:  # whatever DTensor's rules or views raise
        check_refusal(error, f"the proof that {call.target} is token-wise")
        return False
    if moves.cut or moves.ends_sums:
        return False
    wanted, got = (pytree.tree_leaves(x) for x in (fake_value(node), result))
    if len(wanted) != len(got) or not all(map(_is_chunk_of, wanted, got)):
        return False
    return known.trial.run(target, args, kwargs)[1] is None


def _is_chunk_of(chunk: Any, whole: Any) -> bool:
    """Tell whether `chunk` is what a rank of the other axes has of `whole`."""
    if not isinstance(chunk, Tensor):
        return not isinstance(whole, Tensor)
    if not isinstance(whole, DTensor) or not _are_chunks(whole):
        return False
    first, *rest = whole.placements
    if any(p != first and not p.is_replicate() for p in rest):
        return False
    shape = list(expected_shape(whole))
    assert isinstance(first, Shard), "token chunks are sharded"
    shape[first.dim] //= _parts(whole)
    return shape == list(expected_shape(chunk))


def _are_chunks(x: DTensor) -> bool:
    """Tell whether the tokens of x are sharded on other axes too, in equal parts."""
    first, *rest = x.placements
    if type(first) is not Shard or first not in rest:
        return False
    return expected_shape(x)[first.dim] % _parts(x) == 0


def _parts(x: DTensor) -> int:
    """Return into how many parts the other axes shard the tokens of x."""
    first, *rest = x.placements
    sizes = zip(x.device_mesh.shape[1:], rest, strict=True)
    return math.prod(size for size, placement in sizes if placement == first)


def _refuse_other_sources(known: GraphValues, node: fx.Node) -> None:
    leaves = pytree.tree_leaves(fake_value(node))
    if not any(known.is_joint(x) for x in leaves):
        return
    raise RewriteError(
        f"{node.name} at {where(node)} makes a DTensor; needed DTensor.from_local, as "
        "the hooks of parallelize_module have it"
    )


def _has_dtensors(value: Any) -> bool:
    return any(isinstance(x, DTensor) for x in pytree.tree_leaves(value))
