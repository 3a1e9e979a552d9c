"""The profile of the machine that runs, the same on every rank of a group."""

from __future__ import annotations

import itertools
import json
import os

import torch
from torch.distributed.device_mesh import DeviceMesh

from cpcompile.cost.hardware.profile import (
    HardwareProfile,
    load_profile,
    parse_profile,
    profile_text,
)
from cpcompile.cost.hardware.selection import profile_for_device
from cpcompile.ranks.agreement import from_first_rank
from cpcompile.settings import setting


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
