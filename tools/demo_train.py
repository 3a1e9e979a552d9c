"""Run one training of the demo, on one process or as one rank of several.

`demo.py` starts it with a folder that holds task.json; it leaves result.json there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import cpcompile as cp
from tools.gpt import GPT

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Task:
    """What to train; `ranks` is None for one process without cp. `seq` is in tokens."""

    ranks: int | None
    text: str
    seq: int
    batch: int
    steps: int
    layers: int
    width: int
    heads: int
    strategy: str
    inner: str
    seed: int


@dataclass(frozen=True)
class Result:
    """The loss and the seconds of every step; the first one compiles."""

    losses: list[float]
    seconds: list[float]
    explanation: str | None  # of one call of the compiled model


def main(folder: Path) -> None:
    task = Task(**json.loads((folder / "task.json").read_text()))
    torch.set_num_threads(1)
    if task.ranks is not None:
        dist.init_process_group("gloo")
    result = train(task)
    if is_first(task):
        (folder / "result.json").write_text(json.dumps(asdict(result)))
    if task.ranks is not None:
        dist.barrier()
        dist.destroy_process_group()


def train(task: Task) -> Result:
    """Train the model of `task`; on several ranks all of them call this together."""
    torch.manual_seed(task.seed)
    model = GPT(task.width, task.heads, task.layers, task.seq)
    compiled = compile_model(model, task)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    name = "1 process" if task.ranks is None else f'{task.ranks} ranks, backend="cp"'
    losses, seconds = [], []
    with Progress(
        *Progress.get_default_columns(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        disable=not is_first(task),
    ) as progress:
        bar = progress.add_task(name, total=task.steps, loss="compiling")
        for tokens in batches(task):
            start = time.perf_counter()
            loss = compiled(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
            progress.update(bar, advance=1, loss=f"loss {losses[-1]:.4f}")
    if task.ranks is None:
        return Result(losses, seconds, None)
    return Result(losses, seconds, str(cp.explain(compiled, tokens)))


def compile_model(model: GPT, task: Task) -> Any:
    """Compile the model by torch.compile, over all ranks if there are several."""
    if task.ranks is None:
        return torch.compile(model, backend=task.inner)
    mesh = init_device_mesh("cpu", (task.ranks,), mesh_dim_names=("cp",))
    options = {
        "mesh": mesh,
        "shard": {"tokens": 1},
        "strategy": task.strategy,
        "inner": task.inner,
    }
    return torch.compile(model, backend="cp", options=options)


def batches(task: Task) -> Iterator[Tensor]:
    """Yield tokens [B, S] of every step: pieces of the text, equal in all processes."""
    text = torch.frombuffer(bytearray(Path(task.text).read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(task.seed)
    for _ in range(task.steps):
        starts = torch.randint(
            len(text) - task.seq + 1, (task.batch,), generator=generator
        )
        yield torch.stack([text[i : i + task.seq] for i in starts.tolist()]).long()


def is_first(task: Task) -> bool:
    """Tell whether this process reports: the only one, or rank 0."""
    return task.ranks is None or dist.get_rank() == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
