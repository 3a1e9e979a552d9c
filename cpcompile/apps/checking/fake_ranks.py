"""Make this process one of several ranks that exchange nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cpcompile.errors import InputError
from cpcompile.torch_private.fake_groups import FakeStore, forget_meshes


@contextmanager
def fake_ranks(
    ranks: int, device_type: str = "cpu", axis: str = "cp"
) -> Iterator[DeviceMesh]:
    """Make this process the first of `ranks` ranks, inside of the block.

    Nothing is sent, and what collectives return is not defined.

    Returns: a mesh of one axis with all ranks.

    Raises: InputError in a process group that runs.
    """
    if dist.is_initialized():
        raise InputError(
            f"a process group of {dist.get_world_size()} ranks runs here, which fake "
            "ranks would replace; needed a call before init_process_group, or a "
            "process without one: `cpcompile check my_module:make_model_and_inputs`"
        )
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        forget_meshes()
        yield init_device_mesh(device_type, (ranks,), mesh_dim_names=(axis,))
    finally:
        dist.destroy_process_group()
        forget_meshes()
        sys.excepthook = hook  # torch's one says which rank raises
