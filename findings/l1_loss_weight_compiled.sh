#!/usr/bin/env bash
# torch.nn.functional.l1_loss(x, y, weight=w) loses its weight in a compiled program
# (torch 2.13.0): backends "aot_eager" and "inductor" return the loss without weights, and
# so do gradients, without a warning. Backend "eager" returns the right one, and mse_loss
# and huber_loss with a weight are right everywhere.
#
# Any torch function mode does it, also without a compiler: the function hands its call on
# to the mode without the weight. AOTAutograd traces under such a mode.
#
# Exits with 0 as long as it is so, with 1 otherwise. Takes a minute and the disk space
# of torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy

cat >"$folder/run.py" <<'END'
import sys

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


LOSSES = {"l1": F.l1_loss, "mse": F.mse_loss, "huber": F.huber_loss}
x, y = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3)
weight = torch.tensor([0.0, 0.0, 1.0])
wrong = set()
for name, loss in LOSSES.items():

    def weighted(x, y, weight, loss=loss):
        return loss(x, y, weight=weight)

    right = weighted(x, y, weight)
    found = {}
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        run = torch.compile(weighted, backend=backend)
        leaf = x.clone().requires_grad_()
        found[backend] = run(leaf, y, weight)
        found[backend].backward()
        print(f"{name}, {backend}: {found[backend].item():.4f}, gradient {leaf.grad}")
    with Mode():
        found["a mode"] = weighted(x, y, weight)
    print(f"{name}, under a mode: {found['a mode'].item():.4f}; right: {right:.4f}")
    wrong |= {(name, how) for how, z in found.items() if not torch.allclose(z, right)}
print(f"torch {torch.__version__}: wrong are {sorted(wrong)}")
sys.exit(wrong != {("l1", "aot_eager"), ("l1", "a mode")})
END
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/run.py"
