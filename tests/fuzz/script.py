"""The end of a failing program's file: runs it under torchrun and compares it.

What stands below the mark is copied after the program; the names above it are those
that a program defines.
"""

import torch
import torch.nn as nn

WORLD, LENGTHS, DTYPE = 2, (16,), torch.float64
DOOR, MODE, DYNAMIC = "named", "train", None
OPTIONS: dict[str, object] = {}
SETTINGS: dict[str, object] = {}
SHARD = {"x": 1}
DRAWN = False
BATCH, GROWTH = 2, 0
Model = nn.Identity


def inputs(length, batch=2):
    """Arguments of forward."""
    return {"x": torch.randn(batch, length, 16)}


# program above


def steps(called, model, give):
    """Calls with all lengths: results, gradients, buffers."""
    values = {}
    model.train(MODE == "train")
    for number, length in enumerate(LENGTHS):
        for module in model.modules():
            module.rate = 0.2 + number / 8  # of what changes from call to call
        torch.manual_seed(2 + number)
        made = inputs(length, BATCH + number * GROWTH)
        given = {name: give(name, x) for name, x in made.items()}
        torch.manual_seed(5 + number)
        with torch.set_grad_enabled(MODE == "train"):
            results = called(**given)
        results = results if isinstance(results, tuple) else (results,)
        if MODE == "train" and results[0].requires_grad:
            results[0].backward()
        values |= {f"result {number}.{i}": x for i, x in enumerate(results)}
        values |= {f"grad {number}.{k}": x.grad for k, x in given.items()}
    values |= {f"grad {k}": x.grad for k, x in model.named_parameters()}
    values |= {f"buffer {k}": x for k, x in model.named_buffers()}
    return {k: full(x).clone() for k, x in values.items() if x is not None}


def full(x):
    """The whole value of a DTensor."""
    x = x.detach()
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def main():
    """Print what differs from one process; run by torchrun --nproc-per-node WORLD."""
    import copy

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import cpcompile as cp

    torch._inductor.config.fallback_random = True
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
    torch.manual_seed(1)
    model = Model().to(DTYPE)
    alone = copy.deepcopy(model)
    called = torch.compile(alone, backend="aot_eager") if DRAWN else alone
    exact = steps(called, alone, lambda name, x: x)

    def give(name, x):
        if DOOR != "dtensor" or name not in SHARD:
            return x
        given = cp.shard(x.detach(), mesh, SHARD[name]).detach()
        return given.requires_grad_(x.requires_grad)

    options = OPTIONS | ({} if DOOR == "dtensor" else {"mesh": mesh})
    options |= {"shard": SHARD} if DOOR == "named" else {}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="cp", options=options, dynamic=DYNAMIC)
    with cp.config.patch(SETTINGS):
        got = steps(compiled, model, give)
    for name in exact.keys() | got.keys() if dist.get_rank() == 0 else ():
        if name not in exact or name not in got:
            print(f"{name} is missing")
            continue
        difference = (got[name].double() - exact[name].double()).abs().max().item()
        size = exact[name].abs().max().item()
        print(f"{name:20} {difference:.1e} of {size:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
