"""Models that parallelize_module has made tensor parallel, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.cpu.composition.training import (
    LAYERS,
    batches,
    compare,
    in_one_process,
    local_rows,
    loss_of,
    mean_over,
    new_gpt,
    train,
)
from tests.support.bounds import Deviation, check


def parallelized(mesh: DeviceMesh, tokens_too: bool) -> nn.Module:
    """Heads and channels are sharded over tp; tokens too with sequence parallelism."""
    split = Shard(1) if tokens_too else Replicate()
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
        "head": ColwiseParallel(input_layouts=split, output_layouts=Replicate()),
    }
    if tokens_too:
        plan["norm"] = SequenceParallel()
    for i in range(LAYERS):
        layer = {
            **{f"attention.w{x}": ColwiseParallel() for x in "qkv"},
            "attention.wo": RowwiseParallel(output_layouts=split),
            "up": ColwiseParallel(input_layouts=split),
            "down": RowwiseParallel(output_layouts=split),
        }
        if tokens_too:
            layer["attention"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
            layer |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        plan |= {f"layers.{i}.{name}": style for name, style in layer.items()}
    return parallelize_module(new_gpt(), mesh["tp"], plan)


def run(
    shape: tuple[int, int, int], tokens: int, sharded: str, how: str, inner: str
) -> list[Deviation]:
    """Training on dp x cp x tp."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    model = parallelized(mesh, sharded == "tokens")
    options = {"mesh": mesh, "inner": inner}
    call = model
    if how == "whole":
        call = torch.compile(model, backend="cp", fullgraph=True, options=options)
    else:
        for i, block in enumerate(model.layers):
            if "checkpointed" in how:
                block = model.layers[i] = checkpoint_wrapper(block)
            block.compile(backend="cp", options=options)
            if "fsdp" in how:
                fully_shard(block, mesh=mesh["dp", "cp"]._flatten("dp_cp"))
    if "fsdp" in how:
        fully_shard(model, mesh=mesh["dp_cp"])
    dp = mesh["dp"].get_group()
    steps = ([tuple(local_rows(x, dp) for x in pair)] for pair in batches(tokens))
    got = train(model, steps, lambda t, y: loss_of(call(t), y), mean_over(dp))
    return compare(got, in_one_process(tokens))


@pytest.mark.timeout(300)
@pytest.mark.core("tokens-whole")
@pytest.mark.parametrize(
    ("sharded", "how", "shape", "tokens", "inner"),
    [
        ("tokens", "whole", (1, 2, 2), 18, "aot_eager"),
        ("tokens", "whole", (1, 2, 2), 16, "inductor"),
        ("tokens", "blocks", (1, 2, 2), 16, "aot_eager"),
        ("tokens", "checkpointed blocks", (1, 2, 2), 16, "aot_eager"),
        ("tokens", "fsdp blocks", (1, 2, 2), 16, "aot_eager"),
        ("tokens", "fsdp checkpointed blocks", (2, 2, 1), 16, "aot_eager"),
        ("heads", "whole", (1, 2, 2), 17, "aot_eager"),
        ("heads", "whole", (1, 2, 2), 16, "inductor"),
        ("heads", "blocks", (1, 2, 2), 17, "aot_eager"),
        ("heads", "whole", (1, 1, 4), 16, "aot_eager"),
        ("heads", "whole", (1, 4, 1), 17, "aot_eager"),
    ],
)
def test_training(pools, sharded, how, shape, tokens, inner) -> None:
    given = (shape, tokens, sharded, how, inner)
    for found in pools[4].run(run, *given, timeout=280):
        check(found)
