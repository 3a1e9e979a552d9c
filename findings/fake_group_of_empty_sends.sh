#!/usr/bin/env bash
# torch's "fake" process group refuses an all_to_all_single in which this rank receives
# rows and sends none (torch 2.13.0): "alltoall_base: inputBuffer is empty but
# outputSplitSizes[0] > 0". gloo exchanges them, and so does the fake group where the rank
# sends one row more. Programs in which ranks trade unequally many rows, as tokens of an
# uneven sequence or of experts, so fail on the fake group alone. torch 2.15.0 takes it.
#
# Exits with 0 as long as it is so, with 1 otherwise. Takes a minute and the disk space
# of torch.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 numpy

cat >"$folder/run.py" <<'END'
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore


def exchange(rank, back):
    """Rank 0 sends two rows to rank 1, which sends `back` rows."""
    sends, receives = ([0, 2], [0, back]) if rank == 0 else ([back, 0], [2, 0])
    received = torch.zeros(sum(receives), 3)
    try:
        dist.all_to_all_single(received, torch.ones(sum(sends), 3), receives, sends)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "exchanged"


def on_gloo(rank, found):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29655"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found[rank] = [exchange(rank, back) for back in (0, 1)]
    dist.destroy_process_group()


if __name__ == "__main__":
    with mp.Manager() as manager:
        found = manager.dict()
        mp.spawn(on_gloo, (found,), nprocs=2)
        gloo = found[1]
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    fake = [exchange(1, back) for back in (0, 1)]
    dist.destroy_process_group()
    print(f"torch {torch.__version__}, rank 1 sends 0 and 1 rows")
    print(f"gloo: {gloo}\nfake: {fake}")
    refused = fake[0].startswith("alltoall_base: inputBuffer is empty")
    sys.exit(not (refused and fake[1] == "exchanged" and gloo == ["exchanged"] * 2))
END
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/run.py"
