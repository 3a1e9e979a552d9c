"""Blocks that take and return this rank's tokens, under FSDP2, against one process."""

from __future__ import annotations

from collections import Counter

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
from tests.cpu.composition.training import (
    LAYERS,
    batches,
    compare,
    in_one_process,
    local_rows,
    new_gpt,
    train,
)
from tests.support.bounds import Deviation, check

# What torch and our operators call to send messages.
SENDING = ("_c10d_functional::all", "_c10d_functional::reduce", "c10d::", "cp::ring_sh")


class Exchanged:
    """Counts the messages and collectives that are sent inside of the block."""

    def __enter__(self) -> Counter[str]:
        self.counts: Counter[str] = Counter()
        self._profile = torch.profiler.profile()
        self._profile.__enter__()
        return self.counts

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)
        names = (event.name for event in self._profile.events())
        self.counts.update(x for x in names if x.startswith(SENDING))


def run(
    shape: tuple[int, int], tokens: int, layout: str, checkpointed: bool, inner: str
) -> tuple[list[Deviation], list[tuple[int, ...]], Counter[str]]:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    both = mesh["dp", "cp"]._flatten("dp_cp")
    model = new_gpt()
    options = {"inner": inner, "strategy": "ring"}
    style = cp.ContextParallel(options=options, fullgraph=True)
    shapes = []
    for i, block in enumerate(model.layers):
        parallelize_module(block, mesh["cp"], style)
        if checkpointed:
            block = model.layers[i] = checkpoint_wrapper(block)
        fully_shard(block, mesh=both)
        block.register_forward_hook(lambda *given: shapes.append(given[2].shape))
    fully_shard(model, mesh=both)
    dp = mesh["dp"].get_group()
    seen = []

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        local = cp.shard_batch({"ids": ids, "labels": labels}, mesh, layout=layout)
        logits = model(local["ids"]).flatten(0, 1)
        summed = F.cross_entropy(logits, local["labels"].flatten(), reduction="sum")
        seen.append(local["position_ids"].tolist())
        # FSDP2 takes the mean over dp and cp.
        return summed * mesh["cp"].size() / labels.numel()

    def mean(x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()

    steps = ([tuple(local_rows(x, dp) for x in batch)] for batch in batches(tokens))
    got = train(model, steps, loss, mean)
    (rows, _), *_ = batches(tokens)
    with Exchanged() as counts:
        loss(local_rows(rows, dp), local_rows(rows, dp)).backward()
    return compare(got, in_one_process(tokens)), shapes, counts


CASES = {
    "ring": ((1, 2), 32, "contiguous", False, "aot_eager"),
    "zigzag": ((2, 2), 32, "zigzag", False, "aot_eager"),
    "uneven": ((2, 2), 17, "zigzag", False, "aot_eager"),
    "uneven contiguous": ((1, 4), 17, "contiguous", True, "aot_eager"),
    "striped": ((1, 4), 18, "striped", False, "aot_eager"),
    "checkpointed": ((2, 2), 17, "zigzag", True, "aot_eager"),
    "inductor": ((1, 2), 32, "zigzag", False, "inductor"),
}


@pytest.mark.core("uneven", "checkpointed")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_in_the_local_view(pools, case) -> None:
    (dp, ranks), tokens = case[0], case[1]
    for found, shapes, counts in pools[dp * ranks].run(run, *case, timeout=150):
        check(found)
        assert max(shape[1] for shape in shapes) <= -(-tokens // ranks)
        # FSDP2 gathers a block twice and its root once; the rest is a ring's messages.
        gathers, scatters = 2 * LAYERS + 1, LAYERS + 1
        assert counts.pop("c10d::_allgather_base_") == gathers
        assert counts.pop("c10d::_reduce_scatter_base_") == scatters
        assert set(counts) == {"c10d::send", "c10d::recv_", "cp::ring_shift"}
