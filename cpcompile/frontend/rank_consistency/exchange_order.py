"""Describe what ranks exchange in a compiled forward and backward, to be compared.

The same graph is compiled on every rank, but for other sizes. A decision about sizes
may move, repeat or drop an exchange on one rank only. The ranks would then wait for
each other without an end; the comparison makes it an error while they compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from torch import fx

from cpcompile.ops.comm.communicating import communicates
from cpcompile.torch_patches.dead_collectives import Partition


def exchange_texts(partitions: Sequence[Partition]) -> dict[str, str]:
    """Return one item per graph; group names, which differ on a mesh, are left out."""
    return {
        f"exchanges of the {direction}" + (f" {number}" if number else ""): _text(graph)
        for number, partition in enumerate(partitions)
        for direction, graph in zip(("forward", "backward"), partition, strict=True)
    }


def _text(module: fx.GraphModule) -> str:
    words = [_word(node) for node in module.graph.nodes if _communicates(node)]
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    return ", ".join(word if n == 1 else f"{n} {word}" for word, n in runs) or "none"


def _communicates(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if communicates(node.target):
        return True
    is_collective = getattr(node.target, "namespace", None) == "_c10d_functional"
    return is_collective and "wait_tensor" not in str(node.target)


def _word(node: fx.Node) -> str:
    name = str(node.target).split(".")[1]
    reduction = node.args[1] if name.startswith("all_reduce") else None
    return name if reduction is None else f"{name} ({reduction})"
