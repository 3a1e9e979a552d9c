#!/usr/bin/env bash
# An all-reduce with MAX or MIN over gloo (torch 2.13.0) keeps a NaN that lies on rank 0,
# and drops one that lies on another rank, for which it gives the finite number of rank 0.
# torch.amax of the same numbers in one tensor is NaN either way. SUM gives NaN.
#
# So a check for overflow by a maximum over ranks (float8 scales, clipping by the largest
# gradient) sees a NaN of the first rank alone.
#
# Exits with 0 as long as it is so, with 1 otherwise. Takes a minute and the disk space
# of torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy

cat >"$folder/run.py" <<'END'
import math
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, found = dist.get_rank(), {}
for name in ("MAX", "MIN", "SUM"):
    for place in range(2):
        number = torch.tensor(math.nan if rank == place else 1.0)
        dist.all_reduce(number, op=getattr(dist.ReduceOp, name))
        found[name, place] = number.item()
if rank == 0:
    for (name, place), number in found.items():
        print(f"torch {torch.__version__}: {name}, NaN on rank {place}: {number}")
kept = {key for key, number in found.items() if math.isnan(number)}
dist.destroy_process_group()
sys.exit(kept != {("MAX", 0), ("MIN", 0), ("SUM", 0), ("SUM", 1)})
END
OMP_NUM_THREADS=1 "$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/run.py"
