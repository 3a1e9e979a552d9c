#!/usr/bin/env bash
# Four calls that DTensor of torch 2.13.0 computes without an error, and not as one
# device does (two ranks over gloo on a CPU):
#
#     x >> 4                        x itself: `__rshift__` is taken for a call in place,
#                                   by the underscores at the end of its name
#     the gradient of x.amax()      equal entries are counted on each rank alone, because
#                                   the list of dimensions is empty: 0.5, one device 0.25
#     F.cosine_embedding_loss       of features that are split: each rank's summand of a
#                                   sum is filled with 1, so that 1 - cos is 2 - cos
#     F.embedding(scale_grad_by_freq=True)
#                                   of tokens that are split: words are counted on each
#                                   rank alone
#
# Exits with 0 as long as all four are so, with 1 otherwise. Takes a minute and the disk
# space of torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy

cat >"$folder/run.py" <<'END'
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


def shifted(place):
    return place(torch.arange(64, 72), Shard(0)) >> 4


def of_amax(place):
    x = place(torch.tensor([2.0, 1.0, 2.0, 2.0, 0.0, 2.0]), Shard(0)).requires_grad_()
    x.amax().backward()
    return x.grad


def cosine(place):
    first = place(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), Shard(1))
    second = place(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), Replicate())
    return F.cosine_embedding_loss(first, second, place(torch.ones(1), Replicate()))


def by_frequency(place):
    words = place(torch.tensor([0, 0, 0, 1, 0, 0, 2, 3]), Shard(0))
    table = place(torch.ones(4, 2), Replicate()).requires_grad_()
    F.embedding(words, table, scale_grad_by_freq=True).sum().backward()
    return table.grad[:, 0]


different = 0
for call in (shifted, of_amax, cosine, by_frequency):
    one = call(lambda x, placement: x)
    two = call(lambda x, placement: distribute_tensor(x, mesh, [placement]))
    two = two.full_tensor()
    different += not torch.allclose(one.float(), two.float())
    if dist.get_rank() == 0:
        print(f"{call.__name__}: one device {one.tolist()}, DTensor {two.tolist()}")
if dist.get_rank() == 0:
    print(f"torch {torch.__version__}: {different} of 4 differ")
dist.destroy_process_group()
sys.exit(different != 4)
END
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/run.py"
