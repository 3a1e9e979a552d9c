"""Compute what each operator that communicates sends, from its arguments.

Bytes that this rank receives from others count, with the padding that travels. A ring
exchanges the same messages whether it runs as an operator or is unrolled. An all-reduce
of n bytes on N ranks counts as a reduce-scatter and an all-gather, 2 n (N - 1) / N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.accounting.counted_calls import arguments_of
from cpcompile.accounting.graph_account import Kind
from cpcompile.geometry.head_split import HeadSplit
from cpcompile.geometry.layout import Chunks, Layout
from cpcompile.geometry.mask_cache import is_cached
from cpcompile.geometry.tensor_sizes import bytes_of, shape_of
from cpcompile.ops.attention_spec import AttentionInputs, AttentionSpec
from cpcompile.ops.comm.communicating import communicates
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.comm.head_exchange import HeadBlock
from cpcompile.ops.comm.moved_tokens import plan
from cpcompile.ops.comm.relayout import share
from cpcompile.ops.step.kernel_choice import call_kernel
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.strategies.ring_masks import under_mask
from cpcompile.ops.strategies.ring_schedule import Ring
from cpcompile.torch_private.fake_tensors import detect_fake_mode, disable_current_modes

Arguments = Mapping[str, Any]
Formula = Callable[[Arguments, int, int], int | None]
"""Bytes that a rank receives: of arguments, ranks, this rank; None without message."""

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Sent:
    """The exchange of one call; fields as in Exchange."""

    kind: Kind
    messages: int
    bytes: int
    at_most: bool = False


def sent_by(node: fx.Node) -> list[Sent]:
    """Return what a call exchanges when it runs once; [] if it exchanges nothing."""
    target: Any = node.target
    is_torchs = getattr(target, "namespace", None) == "_c10d_functional"
    if not communicates(target) and not (is_torchs and target._opname in _COLLECTIVES):
        return []
    pg = group_by_name(group_of(node))
    if pg.size() == 1:
        return []
    arguments, ranks = arguments_of(node), pg.size()
    if target._opname in _SEVERAL:
        return _SEVERAL[target._opname](arguments, ranks)
    kind, formula = _COLLECTIVES[target._opname]
    size = formula(arguments, ranks, pg.rank())
    return [] if size is None else [Sent(kind, 1, size)]


def group_of(node: fx.Node) -> str:
    """Return the name of the group in which a call communicates."""
    arguments = arguments_of(node)
    return str(arguments.get("group_name", arguments.get("group")))


def _entry(x: Tensor, dim: int) -> int:
    """Return the bytes of one entry of a dimension, such as of a token."""
    sizes = shape_of(x)
    return math.prod(n for d, n in enumerate(sizes) if d != dim) * x.dtype.itemsize


def _packed(arguments: Arguments, tokens: Any) -> int:
    """Return the number of elements of keys and values that travel together."""
    (B, G, _, D), (*_, E) = shape_of(arguments["k"]), shape_of(arguments["v"])
    return B * G * int(tokens) * (D + E)


def _rows_of_all_to_all(arguments: Arguments, ranks: int, rank: int) -> int:
    rows = [int(n) for n in arguments["output_split_sizes"]]
    return (sum(rows) - rows[rank]) * _entry(arguments["input"], 0)


def _keys(arguments: Arguments, ranks: int, rank: int = 0) -> int | None:
    if AttentionSpec.of_text(arguments["spec"]).whole_keys:
        return None
    count = _packed(arguments, Chunks(arguments["sizes"][1], ranks).size)
    return (ranks - 1) * count * int(arguments["k"].dtype.itemsize)


def _keys_and_gradients(arguments: Arguments, ranks: int) -> list[Sent]:
    gathered = _keys(arguments, ranks)
    if gathered is None:
        return []
    dtype = arguments["k"].dtype
    summed = gathered // dtype.itemsize * accumulation_dtype(dtype).itemsize
    return [Sent(Kind.ALL_GATHER, 1, gathered), Sent(Kind.REDUCE_SCATTER, 1, summed)]


def _partial_results(arguments: Arguments, ranks: int, rank: int) -> int:
    """Count the result of a rank's keys, and a logarithm of a sum, of each query."""
    q, v = arguments["q"], arguments["v"]
    rows = math.prod(shape_of(q)[:-1])
    itemsize = accumulation_dtype(q.dtype).itemsize
    return (ranks - 1) * rows * (shape_of(v)[-1] + 1) * itemsize


def _ring(arguments: Arguments, ranks: int) -> list[Sent]:
    ring, at_most = _ring_of(arguments, "forward")
    size = _packed(arguments, ring.keys.padded) * arguments["k"].dtype.itemsize
    shifts = ring.steps - 1
    return [Sent(Kind.MESSAGE, 2 * shifts, shifts * size, at_most)]


def _ring_backward(arguments: Arguments, ranks: int) -> list[Sent]:
    """Count keys and values as in the forward, and gradients once more, to go home."""
    ring, at_most = _ring_of(arguments, "backward")
    chunk, dtype = _packed(arguments, ring.keys.padded), arguments["k"].dtype
    shifts = ring.steps - 1
    homeward = ring.steps if shifts else 0
    size = shifts * dtype.itemsize + homeward * accumulation_dtype(dtype).itemsize
    return [Sent(Kind.MESSAGE, 2 * (shifts + homeward), size * chunk, at_most)]


def _ring_of(arguments: Arguments, direction: str) -> tuple[Ring, bool]:
    """Return the ring as it runs, and whether a mask of data may leave out steps."""
    q, k = arguments["q"], arguments["k"]
    inputs = AttentionInputs.of(arguments["spec"], arguments["extras"])
    ring = Ring.of(inputs, arguments["sizes"], arguments["group"], direction)
    if not inputs.has_modifiers:
        return ring, False
    if not is_cached(inputs.spec.mask_key):
        return ring, (inputs.key_ranges, inputs.q_segment_ids) != (None, None)
    fake_mode = detect_fake_mode([q, k])
    assert fake_mode is not None, "values of a graph are fake"
    with fake_mode:
        kernel = call_kernel(q, arguments["v"], inputs)
        return under_mask(ring, q, kernel), False


def _heads_scattered(arguments: Arguments, ranks: int, rank: int) -> int:
    heads = [shape_of(x)[1] for x in arguments["tensors"]]
    counts = [HeadSplit(heads[0], n, ranks).kv_per_rank for n in heads]
    return _heads(arguments, counts, ranks)


def _heads_gathered(arguments: Arguments, ranks: int, rank: int) -> int:
    return _heads(arguments, [shape_of(x)[1] for x in arguments["tensors"]], ranks)


def _heads(arguments: Arguments, counts: list[int], ranks: int) -> int:
    """Count one row of the buffer from every other rank."""
    tensors, sizes = arguments["tensors"], arguments["sizes"]
    row = sum(
        shape_of(x)[0] * count * int(size) * shape_of(x)[3]
        for x, count, size in zip(tensors, counts, sizes, strict=True)
    )
    return (ranks - 1) * row * int(tensors[0].dtype.itemsize)


def _heads_in_groups(arguments: Arguments, ranks: int, rank: int) -> int:
    """Count what a group of heads sends when its exchange starts."""
    first = arguments["tensors"][0]
    row = sum(
        block.split(ranks).kv_per_rank * int(block.size) * int(block.dim)
        for block in HeadBlock.read(arguments["blocks"])
    )
    return (ranks - 1) * shape_of(first)[0] * row * int(first.dtype.itemsize)


def _pieces(name: str, back: bool = False) -> Formula:
    def received(arguments: Arguments, ranks: int, rank: int) -> int | None:
        names = ("lengths", "layouts", "pieces", "length")
        with disable_current_modes():
            lengths, layouts, pieces, length = (arguments[x] for x in names)
            move = plan(lengths, layouts, pieces, length, ranks, rank, _HOST)
        if move.is_local:
            return None
        x = arguments[name] if back else arguments[name][0]
        count = sum(move.sent if back else move.received)
        return int(count * _entry(x, arguments["dim"]))

    return received


def _relaid(arguments: Arguments, ranks: int, rank: int) -> int | None:
    before, after = Layout(arguments["source"]), Layout(arguments["target"])
    if before is after:
        return None
    with disable_current_modes():
        shared = share(after, before, arguments["length"], ranks, rank, _HOST)
    return shared.moves.numel() * _entry(arguments["x"], arguments["dim"])


def _other_dim(arguments: Arguments, ranks: int, rank: int) -> int:
    """Count the rows of all other ranks, of this rank's columns."""
    x, dims = arguments["x"], (arguments["source"], arguments["target"])
    rows = Chunks(arguments["source_size"], ranks)
    columns = Chunks(arguments["target_size"], ranks).count(rank)
    others = math.prod(n for d, n in enumerate(shape_of(x)) if d not in dims)
    count = others * (rows.length - rows.count(rank)) * columns
    return int(count) * int(x.dtype.itemsize)


def _gathers(*names: str) -> Formula:
    return lambda arguments, ranks, rank: (
        (ranks - 1) * bytes_of([arguments[name] for name in names])
    )


# Operators that send one message, and how many bytes a rank receives by it.
_COLLECTIVES: dict[str, tuple[Kind, Formula]] = {
    "all_gather_into_tensor": (Kind.ALL_GATHER, _gathers("input")),
    "all_reduce": (
        Kind.ALL_REDUCE,
        lambda arguments, n, rank: 2 * bytes_of(arguments["input"]) * (n - 1) // n,
    ),
    "reduce_scatter_tensor": (
        Kind.REDUCE_SCATTER,
        lambda arguments, n, rank: bytes_of(arguments["input"]) * (n - 1) // n,
    ),
    "all_to_all_single": (Kind.ALL_TO_ALL, _rows_of_all_to_all),
    "broadcast": (
        Kind.BROADCAST, lambda arguments, n, rank: bytes_of(arguments["input"]),
    ),
    "dim_exchange": (Kind.ALL_TO_ALL, _other_dim),
    "passed_states": (Kind.ALL_GATHER, _gathers("part", "decay")),
    "passed_states_backward": (Kind.ALL_GATHER, _gathers("grad_first", "grad_last")),
    "all_gather_attention": (Kind.ALL_GATHER, _keys),
    "split_kv_attention": (Kind.ALL_GATHER, _partial_results),
    "ulysses_scatter": (Kind.ALL_TO_ALL, _heads_scattered),
    "ulysses_gather": (Kind.ALL_TO_ALL, _heads_gathered),
    "ulysses_scatter_start": (Kind.ALL_TO_ALL, _heads_in_groups),
    "ulysses_gather_start": (Kind.ALL_TO_ALL, _heads_in_groups),
    "ulysses_scatter_finish": (Kind.ALL_TO_ALL, lambda *what: None),
    "ulysses_gather_finish": (Kind.ALL_TO_ALL, lambda *what: None),
    "moved_tokens": (Kind.ALL_TO_ALL, _pieces("xs")),
    "moved_tokens_backward": (Kind.ALL_TO_ALL, _pieces("grad", back=True)),
    "relayout": (Kind.ALL_TO_ALL, _relaid),
}  # fmt: skip
_SEVERAL: dict[str, Callable[[Arguments, int], list[Sent]]] = {
    "ring_attention": _ring,
    "ring_attention_backward": _ring_backward,
    "all_gather_attention_backward": _keys_and_gradients,
}
