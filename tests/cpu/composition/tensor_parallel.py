"""The tensor-parallel GPT."""

from __future__ import annotations

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.cpu.composition.training import LAYERS, new_gpt


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
