"""Train a small GPT in a loop with Lightning Fabric or accelerate, on dp x cp ranks.

    torchrun --nproc-per-node 1 docs/howto/train_loops.py fabric
    torchrun --nproc-per-node 4 docs/howto/train_loops.py fabric --dp 2 --cp 2
    torchrun --nproc-per-node 4 docs/howto/train_loops.py accelerate --dp 2 --cp 2

Losses are those of one process.
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

import cpcompile as cp

VOCABULARY, WIDTH, HEADS = 64, 32, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, labels):
        logits = self.head(self.blocks(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def rows_of(tokens):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (32, tokens + 1), generator=generator)


def with_fabric(args, device):
    from lightning.fabric import Fabric

    ranks, local = (int(os.environ[x]) for x in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    nodes = ranks // local
    fabric = Fabric(accelerator=device, strategy="ddp", devices=local, num_nodes=nodes)
    fabric.launch()
    mesh = new_mesh(args, device)
    model, optimizer = fabric.setup(*new_model(args, mesh))
    loader = fabric.setup_dataloaders(new_loader(args, mesh))
    clip = functools.partial(fabric.clip_gradients, model, optimizer, max_norm=1.0)
    return model, optimizer, loader, fabric.backward, clip


def with_accelerate(args, device):
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader

    accelerator = Accelerator(cpu=device == "cpu")
    mesh = new_mesh(args, device)
    model, optimizer = accelerator.prepare(*new_model(args, mesh))
    # The sampler has shared the rows out, which accelerate does for one process.
    loader = prepare_data_loader(
        new_loader(args, mesh),
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
    )
    parameters = list(model.parameters())
    clip = functools.partial(accelerator.clip_grad_norm_, parameters, 1.0)
    return model, optimizer, loader, accelerator.backward, clip


def new_mesh(args, device):
    shape = (args.dp, args.cp)
    return init_device_mesh(device, shape, mesh_dim_names=("dp", "cp"))


def new_loader(args, mesh):
    """Return the loader of this rank: ranks of one sequence read the same rows."""
    rows = rows_of(args.tokens)
    sampler = cp.same_rows(rows, mesh, shuffle=False)
    return DataLoader(rows, batch_size=4 // args.dp, sampler=sampler)


def new_model(args, mesh):
    torch.manual_seed(0)
    model = GPT().double()
    options = {"mesh": mesh["cp"], "inner": args.inner}
    model.compile(backend="cp", options=options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


LIBRARIES = {"fabric": with_fabric, "accelerate": with_accelerate}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--inner", default="inductor")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = LIBRARIES[args.library](args, device)
    model, optimizer, loader, backward, clip = found
    for step, batch in zip(range(args.steps), loader, strict=False):
        tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        loss = model(tokens, labels)
        backward(loss)
        norm = clip()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        if int(os.environ["RANK"]) == 0:
            print(f"step {step}: loss {mean:.12f}, norm {norm:.12f}")


if __name__ == "__main__":
    main()
