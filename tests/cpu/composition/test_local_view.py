"""Blocks that take and return this rank's tokens, under FSDP2, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import cpcompile as cp
from tests.cpu.composition.exchanged import Exchanged
from tests.cpu.composition.training import (
    LAYERS,
    WIDTH,
    batches,
    compare,
    in_one_process,
    local_rows,
    loss_of_local_tokens,
    mean_over,
    new_gpt,
    shard_blocks,
    train,
)
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations, gradients

CASES = {
    "ring": ((1, 2), 32, "contiguous", False, "aot_eager"),
    "zigzag": ((2, 2), 32, "zigzag", False, "aot_eager"),
    "uneven": ((2, 2), 17, "zigzag", False, "aot_eager"),
    "uneven contiguous": ((1, 4), 17, "contiguous", True, "aot_eager"),
    "striped": ((1, 4), 18, "striped", False, "aot_eager"),
    "checkpointed": ((2, 2), 17, "zigzag", True, "aot_eager"),
    "inductor": ((1, 2), 32, "zigzag", False, "inductor"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@on_ranks(lambda case: case[0][0] * case[0][1])
def test_training_in_the_local_view(case) -> None:
    shape, tokens, layout, checkpointed, inner = case
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    both = mesh["dp", "cp"]._flatten("dp_cp")
    model = new_gpt()
    options = {"inner": inner, "strategy": "ring"}
    style = cp.ContextParallel(options=options, fullgraph=True)
    shapes = shard_blocks(model, mesh, style, both, checkpointed)
    dp = mesh["dp"].get_group()
    loss = loss_of_local_tokens(model, mesh, layout)
    steps = ([tuple(local_rows(x, dp) for x in batch)] for batch in batches(tokens))
    got = train(model, steps, loss, mean_over(dist.group.WORLD))
    (rows, _), *_ = batches(tokens)
    with Exchanged() as counts:
        loss(local_rows(rows, dp), local_rows(rows, dp)).backward()
    check(compare(got, in_one_process(tokens)))
    assert max(shape[1] for shape in shapes) <= -(-tokens // mesh["cp"].size())
    # FSDP2 gathers a block twice and its root once; the rest is a ring's messages.
    assert counts.pop("c10d::_allgather_base_") == 2 * LAYERS + 1
    assert counts.pop("c10d::_reduce_scatter_base_") == LAYERS + 1
    assert set(counts) == {"c10d::send", "c10d::recv_", "cp::ring_shift"}


class LossOf(nn.Module):
    """The loss of the whole sequence, from local tokens; `scale` is on every rank."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = gpt.norm, gpt.head

    def forward(self, x: Tensor, labels: Tensor, scale: Tensor) -> Tensor:
        # The first token counts twice: positions are those of the whole sequence.
        logits = self.head(self.norm(x) * scale)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss + logits[:, 0].square().mean()


class Whole(nn.Module):
    """Embedding, attention and loss; the scale comes from a parameter in eager."""

    def __init__(self) -> None:
        super().__init__()
        gpt = new_gpt()
        self.embedding, self.block = gpt.embedding, gpt.layers[0]
        self.loss = LossOf(gpt)
        self.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.block(self.embedding(ids)), labels, self.scale * 2)


@pytest.mark.parametrize("tokens", [16, 17])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@on_ranks(2)
def test_a_loss_inside_of_a_module(inner: str, tokens: int) -> None:
    """It is the same on every rank, and needs no factor: FSDP2 takes the mean."""
    ids, labels = next(batches(tokens))
    alone = Whole()
    loss = alone(ids, labels)
    exact = {"loss": loss.detach()} | gradients(loss, alone)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = Whole()
    options = {"inner": inner}
    parallelize_module(model.block, mesh, cp.ContextParallel(options=options))
    style = cp.ContextParallel({"x": 1, "labels": 1}, options=options)
    parallelize_module(model.loss, mesh, style)
    fully_shard(model, mesh=mesh)
    local = cp.shard_batch({"ids": ids, "labels": labels}, mesh, layout="zigzag")
    loss = model(local["ids"], local["labels"])
    check(deviations({"loss": loss.detach()} | gradients(loss, model), exact))
