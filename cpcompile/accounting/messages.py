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

from cpcompile.accounting.graph_account import Kind
from cpcompile.accounting.named_arguments import arguments_of
from cpcompile.geometry.head_split import HeadSplit
from cpcompile.geometry.layout import Chunks, Layout
from cpcompile.geometry.mask_cache import is_cached
from cpcompile.geometry.tensor_sizes import bytes_of, elements_of, size_in_call
from cpcompile.ops.attention_spec import AttentionInputs, AttentionSpec
from cpcompile.ops.comm.communicating import communicates
from cpcompile.ops.comm.communication import group_by_name
from cpcompile.ops.comm.halo_exchange import tokens_received
from cpcompile.ops.comm.head_exchange import HeadBlock
from cpcompile.ops.comm.moved_tokens import plan
from cpcompile.ops.comm.relayout import share
from cpcompile.ops.step.kernel_choice import call_kernel
from cpcompile.ops.step.math_attention import accumulation_dtype
from cpcompile.ops.strategies.ring_masks import under_mask
from cpcompile.ops.strategies.ring_schedule import Ring
from cpcompile.torch_private.dispatch_modes import disable_current_modes
from cpcompile.torch_private.fake_tensors import detect_fake_mode

Arguments = Mapping[str, Any]


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
    if getattr(target, "namespace", None) == "_c10d_functional":
        name = target._opname
        formula = _COLLECTIVES.get(name)
        if formula is None:
            return []
        arguments = arguments_of(node)
        ranks = group_by_name(arguments["group_name"]).size()
        return [formula(arguments, ranks)] if ranks > 1 else []
    if not communicates(target):
        return []
    arguments = arguments_of(node)
    pg = group_by_name(arguments["group"])
    if pg.size() == 1:
        return []
    return _OPERATORS[target._opname](arguments, pg.size(), pg.rank())


def group_of(node: fx.Node) -> str:
    """Return the name of the group in which a call communicates."""
    arguments = arguments_of(node)
    return str(arguments.get("group_name", arguments.get("group")))


def _all_gather(arguments: Arguments, ranks: int) -> Sent:
    return Sent(Kind.ALL_GATHER, 1, (ranks - 1) * bytes_of(arguments["input"]))


def _all_reduce(arguments: Arguments, ranks: int) -> Sent:
    size = bytes_of(arguments["input"])
    return Sent(Kind.ALL_REDUCE, 1, 2 * size * (ranks - 1) // ranks)


def _reduce_scatter(arguments: Arguments, ranks: int) -> Sent:
    size = bytes_of(arguments["input"])
    return Sent(Kind.REDUCE_SCATTER, 1, size * (ranks - 1) // ranks)


def _all_to_all(arguments: Arguments, ranks: int) -> Sent:
    x, rank = arguments["input"], group_by_name(arguments["group_name"]).rank()
    rows = [size_in_call(n) for n in arguments["output_split_sizes"]]
    row = bytes_of(x) // max(size_in_call(x.shape[0]), 1)
    return Sent(Kind.ALL_TO_ALL, 1, (sum(rows) - rows[rank]) * row)


def _broadcast(arguments: Arguments, ranks: int) -> Sent:
    return Sent(Kind.BROADCAST, 1, bytes_of(arguments["input"]))


_COLLECTIVES: dict[str, Callable[[Arguments, int], Sent]] = {
    "all_gather_into_tensor": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
}


def _ring(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    ring, at_most = _ring_of(arguments, "forward")
    chunk = _chunk(ring, arguments)
    shifts, size = ring.steps - 1, chunk * arguments["k"].dtype.itemsize
    return [Sent(Kind.MESSAGE, 2 * shifts, shifts * size, at_most)]


def _ring_backward(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    """Count keys and values as in the forward, and gradients once more, to go home."""
    ring, at_most = _ring_of(arguments, "backward")
    chunk, dtype = _chunk(ring, arguments), arguments["k"].dtype
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


def _chunk(ring: Ring, arguments: Arguments) -> int:
    """Return the number of elements of keys and values that travel together."""
    B, G, _, D = (size_in_call(n) for n in arguments["k"].shape)
    E = size_in_call(arguments["v"].shape[-1])
    return B * G * size_in_call(ring.keys.padded) * (D + E)


def _packed(arguments: Arguments, ranks: int) -> int:
    """Return the number of elements of a chunk of keys and values as it is gathered."""
    B, G, _, D = (size_in_call(n) for n in arguments["k"].shape)
    size = size_in_call(Chunks(arguments["sizes"][1], ranks).size)
    return B * G * size * (D + size_in_call(arguments["v"].shape[-1]))


def _gathered_keys(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    if AttentionSpec.of_text(arguments["spec"]).whole_keys:
        return []
    size = _packed(arguments, ranks) * arguments["k"].dtype.itemsize
    return [Sent(Kind.ALL_GATHER, 1, (ranks - 1) * size)]


def _gathered_keys_backward(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    gathered = _gathered_keys(arguments, ranks, rank)
    if not gathered:
        return []
    itemsize = accumulation_dtype(arguments["k"].dtype).itemsize
    size = _packed(arguments, ranks) * itemsize
    return [
        *gathered,
        Sent(Kind.REDUCE_SCATTER, 1, (ranks - 1) * size),
    ]


def _split_keys(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    q, v = arguments["q"], arguments["v"]
    rows = elements_of(q) // max(size_in_call(q.shape[-1]), 1)
    itemsize = accumulation_dtype(q.dtype).itemsize
    size = rows * (size_in_call(v.shape[-1]) + 1) * itemsize
    return [Sent(Kind.ALL_GATHER, 1, (ranks - 1) * size)]


def _scattered_heads(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    tensors = arguments["tensors"]
    heads = size_in_call(tensors[0].shape[1])
    places = [
        HeadSplit(heads, size_in_call(x.shape[1]), ranks).kv_per_rank for x in tensors
    ]
    return _exchanged(arguments, places, ranks)


def _gathered_heads(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    places = [size_in_call(x.shape[1]) for x in arguments["tensors"]]
    return _exchanged(arguments, places, ranks)


def _in_groups(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    """Count what a group of heads sends when its exchange starts."""
    tensors = arguments["tensors"]
    row = size_in_call(tensors[0].shape[0]) * sum(
        block.split(ranks).kv_per_rank
        * size_in_call(block.size)
        * size_in_call(block.dim)
        for block in HeadBlock.read(arguments["blocks"])
    )
    size = (ranks - 1) * row * tensors[0].dtype.itemsize
    return [Sent(Kind.ALL_TO_ALL, 1, size)]


def _finished(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    return []


def _exchanged(arguments: Arguments, heads: list[int], ranks: int) -> list[Sent]:
    """Count one row of the buffer from every other rank."""
    tensors, sizes = arguments["tensors"], arguments["sizes"]
    row = sum(
        size_in_call(x.shape[0]) * count * size_in_call(size) * size_in_call(x.shape[3])
        for x, count, size in zip(tensors, heads, sizes, strict=True)
    )
    size = (ranks - 1) * row * tensors[0].dtype.itemsize
    return [Sent(Kind.ALL_TO_ALL, 1, size)]


def _halo(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    return _of_neighbours(arguments["x"], arguments, ranks, rank, back=False)


def _halo_backward(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    return _of_neighbours(arguments["grad"], arguments, ranks, rank, back=True)


def _of_neighbours(
    x: Tensor, arguments: Arguments, ranks: int, rank: int, back: bool
) -> list[Sent]:
    chunks = Chunks(arguments["length"], ranks)
    halo = arguments["before"], arguments["after"]
    token = bytes_of(x) // max(size_in_call(x.shape[arguments["dim"]]), 1)
    count = tokens_received(chunks, rank, halo, back)
    return [Sent(Kind.ALL_TO_ALL, 1, count * token)]


def _moved(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    return _of_pieces(arguments["xs"][0], arguments, ranks, rank, back=False)


def _moved_back(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    return _of_pieces(arguments["grad"], arguments, ranks, rank, back=True)


def _of_pieces(
    x: Tensor, arguments: Arguments, ranks: int, rank: int, back: bool
) -> list[Sent]:
    names = ("lengths", "layouts", "pieces", "length")
    lengths, layouts, pieces, length = (arguments[name] for name in names)
    with disable_current_modes():
        move = plan(
            [*map(size_in_call, lengths)],
            layouts,
            [*map(size_in_call, pieces)],
            size_in_call(length),
            ranks,
            rank,
            torch.device("cpu"),
        )
    if move.is_local:
        return []
    sizes = [size_in_call(n) for d, n in enumerate(x.shape) if d != arguments["dim"]]
    token = math.prod(sizes) * x.dtype.itemsize
    return [Sent(Kind.ALL_TO_ALL, 1, sum(move.sent if back else move.received) * token)]


def _relaid(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    x, dim = arguments["x"], arguments["dim"]
    before, after = Layout(arguments["source"]), Layout(arguments["target"])
    if before is after:
        return []
    length = size_in_call(arguments["length"])
    with disable_current_modes():
        host = torch.device("cpu")
        moved = share(after, before, length, ranks, rank, host).moves.numel()
    token = bytes_of(x) // max(size_in_call(x.shape[dim]), 1)
    return [Sent(Kind.ALL_TO_ALL, 1, moved * token)]


def _other_dim(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    rows = Chunks(arguments["source_size"], ranks)
    columns = Chunks(arguments["target_size"], ranks)
    others = size_in_call(rows.length) - size_in_call(rows.count(rank))
    sizes = map(size_in_call, arguments["x"].shape)
    entries = math.prod(
        n
        for d, n in enumerate(sizes)
        if d not in (arguments["source"], arguments["target"])
    )
    count = entries * others * size_in_call(columns.count(rank))
    return [Sent(Kind.ALL_TO_ALL, 1, count * arguments["x"].dtype.itemsize)]


def _states(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    size = bytes_of(arguments["part"]) + bytes_of(arguments["decay"])
    return [Sent(Kind.ALL_GATHER, 1, (ranks - 1) * size)]


def _states_backward(arguments: Arguments, ranks: int, rank: int) -> list[Sent]:
    size = bytes_of(arguments["grad_first"]) + bytes_of(arguments["grad_last"])
    return [Sent(Kind.ALL_GATHER, 1, (ranks - 1) * size)]


_OPERATORS: dict[str, Callable[[Arguments, int, int], list[Sent]]] = {
    "dim_exchange": _other_dim,
    "passed_states": _states,
    "passed_states_backward": _states_backward,
    "ring_attention": _ring,
    "ring_attention_backward": _ring_backward,
    "all_gather_attention": _gathered_keys,
    "all_gather_attention_backward": _gathered_keys_backward,
    "split_kv_attention": _split_keys,
    "ulysses_scatter": _scattered_heads,
    "ulysses_gather": _gathered_heads,
    "ulysses_scatter_start": _in_groups,
    "ulysses_gather_start": _in_groups,
    "ulysses_scatter_finish": _finished,
    "ulysses_gather_finish": _finished,
    "moved_tokens": _moved,
    "moved_tokens_backward": _moved_back,
    "halo_exchange": _halo,
    "halo_exchange_backward": _halo_backward,
    "relayout": _relaid,
}
