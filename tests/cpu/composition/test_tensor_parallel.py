"""Models that parallelize_module has made tensor parallel, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import cpcompile as cp
from tests.cpu.composition.tensor_parallel import parallelized
from tests.cpu.composition.training import (
    batches,
    compare,
    in_one_process,
    local_rows,
    loss_of,
    mean_over,
    train,
)
from tests.support.bounds import Deviation, check


def run(
    shape: tuple[int, int, int], tokens: int, sharded: str, how: str, inner: str
) -> list[Deviation]:
    """Training on dp x cp x tp."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    model = parallelized(mesh, sharded == "tokens")
    options = {"mesh": mesh, "inner": inner}
    if "zigzag" in how:
        options |= {"strategy": "ring", "layout": "zigzag"}
    call = model
    if "whole" in how:
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
@pytest.mark.core("tokens-whole-shape0-18-aot_eager")
@pytest.mark.parametrize(
    ("sharded", "how", "shape", "tokens", "inner"),
    [
        ("tokens", "whole", (1, 2, 2), 18, "aot_eager"),
        ("tokens", "whole, zigzag", (1, 2, 2), 16, "aot_eager"),
        ("tokens", "blocks, zigzag", (1, 2, 2), 16, "aot_eager"),
        ("heads", "whole, zigzag", (1, 2, 2), 17, "aot_eager"),
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


def run_local(
    tokens: int, sharded: str, layout: str, checkpointed: bool, inner: str
) -> tuple[list[Deviation], list[int]]:
    """FSDP2 over dp x cp of blocks that are tensor parallel and have local tokens."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    both = mesh["dp", "cp"]._flatten("dp_cp")
    model = parallelized(mesh, sharded == "tokens")
    style = cp.ContextParallel(options={"inner": inner, "strategy": "ring"})
    shapes = []
    for i, block in enumerate(model.layers):
        parallelize_module(block, mesh["cp"], style)
        if checkpointed:
            block = model.layers[i] = checkpoint_wrapper(block)
        fully_shard(block, mesh=both)
        block.register_forward_hook(lambda *given: shapes.append(given[2].shape[1]))
    fully_shard(model, mesh=both)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        local = cp.shard_batch({"ids": ids, "labels": labels}, mesh, layout=layout)
        logits = model(local["ids"]).flatten(0, 1)
        summed = F.cross_entropy(logits, local["labels"].flatten(), reduction="sum")
        return summed * mesh["cp"].size() / labels.numel()

    def mean(x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    steps = ([batch] for batch in batches(tokens))
    got = train(model, steps, loss, mean)
    return compare(got, in_one_process(tokens)), shapes


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "sharded", "layout", "checkpointed", "inner"),
    [
        (16, "tokens", "zigzag", False, "aot_eager"),
        (16, "tokens", "contiguous", True, "aot_eager"),
        (16, "tokens", "contiguous", False, "aot_eager"),
        (16, "tokens", "zigzag", True, "aot_eager"),
        (16, "tokens", "zigzag", True, "inductor"),
        (17, "heads", "zigzag", False, "aot_eager"),
        (17, "heads", "zigzag", True, "aot_eager"),
        (16, "heads", "striped", False, "aot_eager"),
    ],
)
def test_training_in_the_local_view(
    pools, tokens, sharded, layout, checkpointed, inner
) -> None:
    given = (tokens, sharded, layout, checkpointed, inner)
    for found, shapes in pools[4].run(run_local, *given, timeout=280):
        check(found)
        assert max(shapes) <= -(-tokens // (4 if sharded == "tokens" else 2))
