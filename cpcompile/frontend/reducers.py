"""Find the wrapper that reduces the gradient of a parameter, and over which ranks.

Note [Gradients under a wrapper]
Inside of a graph a rank computes its share of a parameter's gradient, from its own
tokens: the sum of the shares over the axis is the gradient. A wrapper may take the mean
over ranks that include the ranks of the axis. It expects from each rank the gradient of
a batch of its own, and so it gets the share times the size of the axis. Eager modules
beside the graph have the whole sequence on every rank and hand in complete gradients.
Their mean is right as well: both kinds of modules may be wrapped together.

Dynamo's guards do not see wrappers, and layers of one class share a program. So a
program looks again when it is called with the parameters of another module, or when
DDP's forward begins or ends to be around it (`GradientContracts`). A checkpoint runs
its forward again in the backward, when DDP's forward is over: there the DDP module
around the last forward counts.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

# Private interfaces, seen in torch 2.13 to 2.15.
from torch._dynamo.utils import get_optimize_ddp_mode
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from cpcompile.errors import InputError
from cpcompile.frontend.arguments import Frame
from cpcompile.frontend.meshes import real_input
from cpcompile.logs import warn_once
from cpcompile.options import GradSync, Options
from cpcompile.passes.graph.context import PARAMETERS, Context, GraphInput


@dataclass(frozen=True)
class Reducer:
    """A wrapper that reduces gradients after the backward.

    ranks: global ranks that it reduces over. mean: whether it divides by their number.
    """

    name: str
    ranks: frozenset[int]
    mean: bool

    @property
    def expects(self) -> GradSync:
        """Gradient contract that makes its reduction over all of `ranks` right."""
        return GradSync.AVERAGE if self.mean else GradSync.NONE

    def __str__(self) -> str:
        how = "averages" if self.mean else "sums"
        return f"{self.name}, which {how} over the ranks {sorted(self.ranks)}"


def active_ddp() -> DistributedDataParallel | None:
    """Return the DDP module whose forward is running, or None."""
    ddp: DistributedDataParallel | None
    ddp = DistributedDataParallel._get_active_ddp_module()
    return ddp


def reducers(ddp: DistributedDataParallel | None) -> dict[int, Reducer]:
    """Return the reducers of all parameters that have one, by the parameters' ids.

    ddp: the module whose forward is running.
    """
    by_id = {} if ddp is None else _of_ddp(ddp)
    for reference in list(_module_state_mapping.values()):
        for group in getattr(reference(), "_fsdp_param_groups", ()):
            reducer = _of_fsdp(group)
            for parameter in group.fsdp_params:
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    by_id[id(whole)] = reducer
    return by_id


def _of_ddp(ddp: DistributedDataParallel) -> dict[int, Reducer]:
    ranks = frozenset(dist.get_process_group_ranks(ddp.process_group))
    return {id(x): Reducer("DDP", ranks, mean=True) for x in _reduced_by(ddp)}


def _reduced_by(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters of a DDP module, except those it was told to ignore."""
    # The first list lacks what DDP reduces later, in a hook.
    return [*ddp._module_parameters, *ddp._delay_all_reduce_params]


def _of_fsdp(group: Any) -> Reducer:
    ranks = frozenset(group.mesh_info.mesh.mesh.flatten().tolist())
    # Whoever sets the divisor himself wants the sum of what the ranks have.
    return Reducer("FSDP2", ranks, mean=group.gradient_divide_factor is None)


def settled(
    asked: GradSync | None,
    reducer: Reducer | None,
    mesh: DeviceMesh,
    local: bool = False,
) -> GradSync:
    """Return the contract of one parameter; `asked` is the option.

    local: whether each rank has a loss of its own, as in the local view. Its backward
    gives what any wrapper over the axis expects.

    Raises: InputError if it contradicts what the wrapper does, or if the wrapper
    reduces over a part of the mesh.
    """
    if local:
        return _settled_of_shares(asked, reducer, mesh)
    if reducer is None:
        return asked or GradSync.REDUCE
    ours = _ranks(mesh)
    common = ours & reducer.ranks
    among = len(common) > 1 or len(ours) == 1
    if among and common != ours:
        raise InputError(
            f"parameters are managed by {reducer}, and the sequence is sharded over "
            f"the ranks {sorted(ours)}; needed all of these among the former, or only "
            'one: wrap over mesh["dp"], or over both axes: '
            'mesh["dp", "cp"]._flatten("dp_cp")'
        )
    expected = reducer.expects if among else GradSync.REDUCE
    if asked is None:
        return expected
    if asked not in (expected, GradSync.REDUCE) or (
        asked is GradSync.REDUCE and among and not reducer.mean
    ):
        raise InputError(
            f"options['grad_sync'] is {asked.value!r}, and parameters are managed by "
            f"{reducer}; needed {expected.value!r} for gradients over the ranks "
            f"{sorted(ours)}: leave 'grad_sync' away"
        )
    return asked


def _settled_of_shares(
    asked: GradSync | None, reducer: Reducer | None, mesh: DeviceMesh
) -> GradSync:
    if asked not in (None, GradSync.NONE):
        raise InputError(
            f"options['grad_sync'] is {asked.value!r} in the local view, where each "
            "rank's backward gives its share of the gradients; needed 'none': leave it "
            "away"
        )
    if reducer is not None and not _ranks(mesh) <= reducer.ranks:
        raise InputError(
            f"parameters are managed by {reducer}, and tokens are local on the ranks "
            f"{sorted(_ranks(mesh))}, so that nothing would add up the shares of the "
            'gradients; needed all of these ranks: wrap over mesh["dp", '
            '"cp"]._flatten("dp_cp")'
        )
    return GradSync.NONE


def _ranks(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(mesh.mesh.flatten().tolist())


def warn_of_late_gradients(ctx: Context, frame: str) -> None:
    """Warn if DDP cannot send gradients during a backward because its graph is whole.

    See Note [Graphs under DDP]. A user who has switched DDPOptimizer off does not
    expect it, and gets no warning.
    """
    ddp = active_ddp()
    if ddp is None or not ctx.backward or get_optimize_ddp_mode() != "ddp_optimizer":
        return
    byte_counts = {id(x): x.nbytes for x in _reduced_by(ddp) if x.requires_grad}
    inside = sum(byte_counts.get(id(real_input(node)), 0) for node in ctx.inputs)
    outside = sum(byte_counts.values()) - inside
    ranks, bucket = ddp.process_group.size(), ddp.bucket_bytes_cap
    if ranks == 1 or inside <= bucket or outside >= bucket:
        return
    warn_once(
        f"{frame}: DDP sums {inside / 1e6:.3g} MB of gradients over {ranks} ranks when "
        "the backward has ended, and not beside it: DDPOptimizer cuts the graphs of "
        'other backends where a bucket of DDP ends; those of backend "cp" stay whole, '
        "because every rank would gather all tokens at a cut. To have the sums hidden, "
        'compile the blocks one by one: parallelize_module(block, mesh["cp"], '
        "cp.ContextParallel()); if they take little time, "
        "torch._dynamo.config.optimize_ddp = False says so, without this warning"
    )


def gradient_contracts(ctx: Context) -> str:
    """Return a text of what gradients are, the same on every rank of a mesh.

    It does not say for which wrapper: one over dp has other ranks on each rank of cp.
    """
    counts = Counter(graph_input.gradient.value for graph_input in ctx.inputs.values())
    return ", ".join(f"{count} {gradient}" for gradient, count in counts.items())


# By the first parameter of a program: the DDP module around the last forward, or None.
_last_around: Any = WeakIdKeyDictionary()


class GradientContracts:
    """Check, when a program runs, that gradients are still what wrappers expect."""

    def __init__(self, ctx: Context, options: Options, frame: Frame) -> None:
        self._mesh, self._local = ctx.mesh, options.local_view
        self._frame, self._backward = frame.name, ctx.backward
        self._parameters = [
            (place, graph_input)
            for place, graph_input in enumerate(ctx.inputs.values())
            if graph_input.kind in PARAMETERS and not graph_input.placements
        ]
        # By the first parameter: the DDP module around a call that was right.
        self._checked: Any = WeakIdKeyDictionary()

    def check(self, args: Sequence[Any]) -> None:
        """Raise InputError if `args` are managed otherwise than when compiled."""
        if not self._parameters:
            return
        first = args[self._parameters[0][0]]
        # A reentrant checkpoint's forward has no gradients, and is another program.
        if torch._C._current_graph_task_id() == -1:
            ddp = active_ddp()
            _last_around[first] = None if ddp is None else weakref.ref(ddp)
        if not self._backward or first not in _last_around:
            return
        around = _last_around[first]
        if first in self._checked and self._checked[first] is around:
            return
        managed = reducers(None if around is None else around())
        for place, graph_input in self._parameters:
            now = managed.get(id(args[place]))
            if not self._fits(graph_input, now):
                raise InputError(
                    f"{self._frame} was compiled while its parameters were managed by "
                    f"{graph_input.reducer or 'no wrapper'}, and they are managed by "
                    f"{now or 'no wrapper'} now; their gradients would be wrong. Wrap "
                    "a model before its first call, or call torch.compiler.reset() "
                    "after it was wrapped or unwrapped"
                )
        self._checked[first] = around

    def _fits(self, graph_input: GraphInput, now: Reducer | None) -> bool:
        if now is None:
            return graph_input.reducer is None
        try:
            settled(graph_input.gradient, now, self._mesh, self._local)
        except InputError:
            return False
        return True
