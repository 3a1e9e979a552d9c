"""Read what one Dynamo graph asks for, and describe it, for the ranks to compare.

The profile of the machine that runs is the same on every rank of a group.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor

from cpcompile.cost.hardware.profile import (
    HardwareProfile,
    load_profile,
    parse_profile,
    profile_text,
)
from cpcompile.cost.hardware.selection import profile_for_device
from cpcompile.errors import InputError
from cpcompile.frontend.arguments import Frame, argument_path, named_inputs
from cpcompile.frontend.changing_floats import read_floats
from cpcompile.frontend.inference import infer_inputs
from cpcompile.frontend.meshes import find_mesh, read_stand_ins
from cpcompile.frontend.rank_consistency.environment import how_watched, surroundings
from cpcompile.frontend.symbolic_sizes import rows_of, specialize_sizes, symbolic_length
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import leaves_ranks_empty
from cpcompile.geometry.lengths import expected
from cpcompile.logs import warn_unmet
from cpcompile.options import Options, parse_options
from cpcompile.passes.graph.context import Context
from cpcompile.passes.graph.nodes import has_tensors, make_objects, whole_value
from cpcompile.passes.graph.readable import readable
from cpcompile.passes.placement.gathered_parameters import read_local_parts
from cpcompile.ranks.agreement import check_agreement, from_first_rank, report_failure
from cpcompile.ranks.digests import value_text
from cpcompile.ranks.shardings import check_process_group, factors
from cpcompile.settings import setting
from cpcompile.torch_patches import tracing
from cpcompile.torch_private.dynamo import RestartAnalysis

# The names in `shard` that an earlier graph of a function has had: an argument that is
# passed by keyword may be left away later. They go with the function's code.
_known_names: WeakKeyDictionary[CodeType, set[str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Request:
    """A graph's options and inputs, and where it is to run; the same on every rank.

    named: the inputs to shard, with name and dimension.
    length: the length of the sequence, if it is to stay a symbol.
    rows: the number of rows of the batch, if that alone is to stay a symbol.
    """

    options: Options
    frame: Frame
    mesh: DeviceMesh
    axis: int
    named: dict[fx.Node, tuple[str, int]]
    length: torch.SymInt | None
    rows: torch.SymInt | None
    degrees: CPDegrees | None
    profile: HardwareProfile

    @property
    def group(self) -> ProcessGroup:
        """The ranks that compile the graph together."""
        return self.mesh.get_group(self.axis)


def agreed_request(
    graph: fx.Graph,
    options: Mapping[str, Any] | None,
    frame: Frame,
    mode: str | None = None,
    **internal: bool,
) -> Options | Request:
    """Return the request; only the options where nothing of the graph is sharded.

    internal: see `parse_options`.

    Raises: OptionError, InputError; RankMismatchError, also where another rank raises
    one of these two.
    """
    doing = f"compiles {frame.name}"
    try:
        parsed = parse_options(options, mode, **internal)
        check_process_group()
        read_stand_ins(graph)
        mesh_axis = find_mesh(graph, parsed, frame)
        if mesh_axis is None or not has_tensors(graph):  # a part, around a graph break
            return parsed
        mesh, axis = mesh_axis
        read_floats(graph, frame.code)
        read_local_parts(graph)
        make_objects(graph)
        _check_device(mesh, axis)
        tracing.forget_decisions()
        names = set() if frame.code is None else _known_names.get(frame.code, set())
        named = named_inputs(graph, parsed.shard, frame, names)
        if frame.code is not None:
            _known_names[frame.code] = names
        if not parsed.shard or frame.is_part:
            named = infer_inputs(graph, frame, mesh, axis) | named
        length = symbolic_length(graph, named, mesh, axis)
        rows = rows_of(named) if length is None else None
        specialize_sizes(graph, length, rows)
        degrees = factors(parsed.mesh or mesh._get_root_mesh(), parsed.axis)
        description = describe(graph, parsed, named, frame, mesh.device_type)
    except RestartAnalysis:  # no rank has been told of this trace
        raise
    except Exception as error:  # whatever it is, the others wait for this rank
        group = _group(graph, options, frame)
        if group is not None:
            report_failure(group, error, doing)
        raise
    check_agreement(mesh.get_group(axis), description, doing)
    profile = agreed_profile(mesh, axis)
    return Request(parsed, frame, mesh, axis, named, length, rows, degrees, profile)


def _group(graph: fx.Graph, options: Any, frame: Frame) -> ProcessGroup | None:
    """Return the ranks that wait for this one, if mesh and axis at least are right."""
    try:
        mesh_options = {k: options[k] for k in ("mesh", "axis") if k in (options or ())}
        mesh_axis = find_mesh(graph, parse_options(mesh_options), frame)
        return None if mesh_axis is None else mesh_axis[0].get_group(mesh_axis[1])
    except Exception:  # it cannot be told; the first error counts
        return None


def _check_device(mesh: DeviceMesh, axis: int) -> None:
    """Raise InputError for a mesh of GPUs where there is none.

    A fake group stands for a machine that is elsewhere.
    """
    fake = dist.get_backend(mesh.get_group(axis)) == "fake"
    if mesh.device_type == "cuda" and not torch.cuda.is_available() and not fake:
        raise InputError(
            "the mesh is of device type 'cuda', and torch sees no GPU here; needed a "
            "GPU per rank, or a mesh of device type 'cpu'"
        )


def inner_for(ctx: Context, options: Options) -> Options:
    """Return the options, without Inductor where a rank holds no token of a sequence.

    Inductor drops calls whose results are empty, and with them their collectives. So
    where a rank holds no token at all, every rank runs without Inductor; such sequences
    are shorter than the square of the number of ranks.
    """
    lengths = ctx.sequence_lengths()
    empty = [n for n in lengths if leaves_ranks_empty(n, ctx.ranks)]
    if not empty or options.inner != "inductor":
        return options
    why = f"some of {ctx.ranks} ranks hold none of it; 'aot_eager' compiles it"
    warn_unmet(
        f"a sequence of {min(empty)} tokens", "options['inner'] = 'inductor'", why
    )
    return dataclasses.replace(options, inner="aot_eager")


def describe(
    graph: fx.Graph,
    options: Options,
    named: dict[fx.Node, tuple[str, int]],
    frame: Frame,
    device_type: str,
) -> dict[str, str]:
    """Return what the ranks must agree on, item by item.

    The values of named integers are included: ranks that load different tokens, as for
    data parallelism, would otherwise train on a mixture without a sign. Where the user
    names nothing, the values of all integer arguments are included: what is not sharded
    has to be the same on every rank, too.
    """
    inductor = options.inner == "inductor"
    description = {"options": options.fingerprint()}
    description |= surroundings(device_type, frame.values, inductor) | how_watched()
    compared = {node: name for node, (name, _) in named.items()}
    for node in graph.find_nodes(op="placeholder"):
        value = whole_value(node)
        if isinstance(value, Tensor):
            shape = [expected(n) for n in value.shape]
            text = f"{value.dtype} {shape}"
            if value.device.type != device_type:
                text += f" on {value.device.type}"
            if isinstance(value, DTensor):
                text += f", {value.placements}"
            if value.requires_grad:
                text += ", requires_grad"
            description[f"input {node.name}"] = text
        path = argument_path(node, frame)
        if path is not None and not options.shard and not isinstance(value, DTensor):
            compared.setdefault(node, ".".join(path))
    for node, name in compared.items():
        digest = _digest(getattr(node.meta.get("grapharg"), "example", None))
        if digest is not None:
            description[f"values of {name}"] = digest
    text = hashlib.sha256(readable(graph).encode()).hexdigest()
    return description | {"graph": text[:12]}


def _digest(x: object) -> str | None:
    """Return a digest of an integer tensor's values; None for anything else."""
    if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex():
        return None
    return value_text(x)


def agreed_profile(mesh: DeviceMesh, axis: int) -> HardwareProfile:
    """Return what the first rank of the axis knows of the machine; all ranks call it.

    The profile is the one that `config.hardware` names, or for "auto" the one that
    fits. Its memory is what is free on the GPU now, and its ranks per node are as the
    launcher started them.

    Raises: ValueError for an unknown name, a broken file or a device without profile.
    """

    def local() -> str:
        profile = machine_profile(mesh, axis)
        return json.dumps([profile.name, profile_text(profile)])

    doing = "asks the first rank for its hardware profile"
    name, text = json.loads(from_first_rank(mesh.get_group(axis), local, doing))
    return parse_profile(name, text, "profile of the first rank")


def machine_profile(mesh: DeviceMesh, axis: int) -> HardwareProfile:
    """Return what this process knows of the machine."""
    device_type, ranks = mesh.device_type, mesh.size(axis)
    name = setting("hardware")
    if name is not None:
        profile = load_profile(name)
    else:
        profile = profile_for_device(device_type, _device_name(device_type), ranks)
    changes: dict[str, float] = {}
    if device_type == "cuda" and torch.cuda.is_available():
        changes["memory_bytes"] = float(torch.cuda.mem_get_info()[0])
    near = ranks_on_this_node(mesh, axis)
    if near is not None:
        changes["ranks_per_node"] = float(near)
    return profile.with_overrides(changes)


def ranks_on_this_node(mesh: DeviceMesh, axis: int) -> int | None:
    """Count the axis's ranks on one node, if the launcher says so (torchrun).

    None also where ranks of one node do not follow each other in the axis: what two
    neighbours send crosses nodes there more often than a count says.
    """
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local.isdigit() or int(local) < 1:
        return None
    ranks = torch.distributed.get_process_group_ranks(mesh.get_group(axis))
    nodes = [rank // int(local) for rank in ranks]
    borders = sum(a != b for a, b in itertools.pairwise(nodes))
    if borders != len(set(nodes)) - 1:
        return None
    return nodes.count(nodes[0])


def _device_name(device_type: str) -> str:
    if device_type != "cuda" or not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_name())
