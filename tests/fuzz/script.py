"""A program that fails: torchrun --nproc-per-node WORLD of it compares it.

The program, and the functions that are imported here from on_rank.py, take the place
of what stands between the other imports and the mark.
"""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext  # noqa: F401  the functions need it

import torch
import torch.nn as nn

import cpcompile as cp
from cpcompile.apps.verification.bounds import whole  # noqa: F401  as well
from tests.fuzz.on_rank import door_of, make_model, steps

WORLD, DRAWN, OPTIONS, SETTINGS = 2, False, {}, {}
DOOR, DYNAMIC, SHARD = "named", None, {"x": 1}
Model = nn.Identity

# program above


def main():
    """Print what differs from one process; run by torchrun --nproc-per-node WORLD."""
    torch._inductor.config.fallback_random = True
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (WORLD,), mesh_dim_names=("cp",)
    )
    program = sys.modules["__main__"]
    model = make_model(program)
    alone = copy.deepcopy(model)
    called = torch.compile(alone, backend="aot_eager") if DRAWN else alone
    exact = steps(program, called, alone)
    options = OPTIONS | ({} if DOOR == "dtensor" else {"mesh": mesh})
    options |= {"shard": SHARD} if DOOR == "named" else {}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="cp", options=options, dynamic=DYNAMIC)
    with cp.config.patch(SETTINGS):
        got = steps(program, compiled, model, door_of(program, mesh))
    for name in exact.keys() | got.keys() if mesh.get_rank() == 0 else ():
        if name not in exact or name not in got:
            print(f"{name} is missing")
            continue
        difference = (got[name].double() - exact[name].double()).abs().max().item()
        size = exact[name].abs().max().item()
        print(f"{name:20} {difference:.1e} of {size:.1e}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
