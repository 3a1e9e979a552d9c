"""Pretraining with FSDP2 over dp x cp, each block compiled for context parallelism.

    torchrun --nproc-per-node 4 docs/howto/train_fsdp2_cp.py --dp 2 --cp 2

Between blocks every rank has its own tokens only. A step sends what FSDP2 sends, and
the keys and values of attention.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import cpcompile as cp

VOCABULARY, WIDTH, HEADS, LAYERS = 256, 64, 4, 2


class Attention(nn.Module):
    """Causal attention with rotary positions of the whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        positions = torch.arange(tokens, device=x.device)
        q, k = rotated(q, positions), rotated(k, positions)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, WIDTH))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary position embedding of x [B, H, S, D]."""
    half = x.shape[-1] // 2
    rates = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angles = (positions[:, None] * rates).to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Block(nn.Module):
    """A transformer layer; nothing in it knows of context parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A decoder of LAYERS blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def parallelize(model: Transformer, mesh: DeviceMesh, inner: str) -> None:
    """Context parallelism, activation checkpointing and FSDP2, block by block."""
    style = cp.ContextParallel(options={"inner": inner})
    fsdp_mesh = mesh["dp", "cp"]._flatten("dp_cp")
    for i, block in enumerate(model.layers):
        parallelize_module(block, mesh["cp"], style)
        model.layers[i] = checkpoint_wrapper(block)
        fully_shard(model.layers[i], mesh=fsdp_mesh)
    fully_shard(model, mesh=fsdp_mesh)


def batches(steps: int, batch: int, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, labels), the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        text = torch.randint(VOCABULARY, (batch, tokens + 1), generator=generator)
        yield text[:, :-1], text[:, 1:]


def train(given: argparse.Namespace) -> None:
    """Train."""
    shape = (given.dp, given.cp)
    mesh = init_device_mesh(given.device, shape, mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, given.dtype))
    model = Transformer().to(given.device)
    parallelize(model, mesh, given.inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if given.resume:
        first = load(given.resume, model, optimizer)
    for step, (ids, labels) in enumerate(
        batches(given.steps, given.batch, given.tokens)
    ):
        if step < first:
            continue
        rows = slice(mesh["dp"].get_local_rank(), None, given.dp)
        batch = {"ids": ids[rows], "labels": labels[rows]}
        count = batch["labels"].numel()  # of the rows of this cp group
        batch = cp.shard_batch(batch, mesh, layout="zigzag")
        logits = model(batch["ids"].to(given.device)).flatten(0, 1)
        labels = batch["labels"].to(given.device).flatten()
        summed = F.cross_entropy(logits, labels, reduction="sum")
        # FSDP2 takes the mean over dp x cp; over cp it has to be the sum.
        loss = summed * given.cp / count
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = torch.stack([loss.detach(), norm.full_tensor() / dist.get_world_size()])
        dist.all_reduce(shown)
        shown[0] /= dist.get_world_size()
        if dist.get_rank() == 0:
            print(
                f"step {step}: loss {shown[0]:.12f}, norm {shown[1]:.12f}", flush=True
            )
        if given.save and step + 1 == given.save_after:
            save(given.save, step + 1, model, optimizer)


def save(
    path: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Save a checkpoint that any number of ranks can load."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": step}, checkpoint_id=path)


def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint; return the step with which to go on."""
    weights, state = get_state_dict(model, optimizer)
    stored = {"model": weights, "optimizer": state, "step": 0}
    dcp.load(stored, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=stored["model"],
        optim_state_dict=stored["optimizer"],
    )
    return int(stored["step"])


def main() -> None:
    """Read the arguments, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dp", type=int, default=1, help="ranks that share the batch")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--inner", default="inductor", choices=["inductor", "aot_eager"]
    )
    parser.add_argument("--save", help="where a checkpoint goes")
    parser.add_argument("--save-after", type=int, default=2, help="steps until then")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    given = parser.parse_args()
    dist.init_process_group()
    try:
        train(given)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
