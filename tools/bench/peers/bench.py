"""Time attention alone on CPU ranks of one thread each, against other packages.

Forward and backward, causal and of packed documents, float32 and bfloat16, B=1, H=8,
D=64. All peers take turns within one run, so that a slow minute of the machine meets
all of them; a figure is the median of its repetitions, a time is that of the slowest
rank. Every peer is first compared with exact results on a short sequence; one that
cannot take part is listed with the reason. Other packages are optional: packages.py
says how to install them. Results go to docs/results/bench_peers.*.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cpcompile.cost.choose import choose
from cpcompile.cost.hardware.selection import profile_for_device
from cpcompile.cost.plans import Direction, Strategy, Workload
from cpcompile.geometry.layout import Layout
from tools.bench.operands import (
    BATCH,
    CHECK_TOKENS,
    HEAD_DIM,
    HEADS,
    SIZES,
    exact,
    make_whole,
    relative_error,
)
from tools.bench.peers import documents, memory
from tools.bench.peers.attentions import (
    OURS,
    LeftOut,
    Offer,
    Peer,
    one_process,
    own_offers,
)
from tools.bench.peers.documents import Mask
from tools.bench.peers.packages import package_offers, versions
from tools.bench.peers.report import markdown
from tools.bench.progress import Event, collect
from tools.bench.ranks import in_processes
from tools.results import RESULTS, setup, write_report

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RANKS = (2, 4)
# For slow peers a third of the repetitions is enough, and no length beyond this one.
SLOW_SHARE, SLOW_TOKENS = 3, 8192
LONG_TOKENS, LONG_REPS = 8192, 3
# Errors may be this many times that of one process in the same dtype: a ring sums up in
# another order. In float32 that error may be nearly nothing.
ALLOWED_ERRORS, FLOAT32_ERROR = 4.0, 1e-5


@dataclass(frozen=True)
class Case:
    """What is measured with all peers in turns."""

    dtype: str
    mask: Mask
    tokens: int
    reps: int


def main(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("--seq", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument(
        "--many-ranks-seq",
        type=int,
        nargs="*",
        default=[4096, 8192],
        help="with more ranks than cores",
    )
    parser.add_argument("--reps", type=int, default=5, help=f"{LONG_REPS} if long")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder")
    given = parser.parse_args(arguments)
    cases = {
        ranks: [
            Case(
                *kind, n, min(given.reps, LONG_REPS) if n >= LONG_TOKENS else given.reps
            )
            for kind in product(given.dtype, Mask)
            for n in lengths
        ]
        for ranks, lengths in zip(RANKS, (given.seq, given.many_ranks_seq), strict=True)
    }
    about = setup(sizes=SIZES, reps=given.reps, packages=versions())
    record: dict[str, Any] = {"setup": about, "times": [], "left_out": []}
    record |= {"chosen": [], "memory": []}
    steps = sum(case.reps + 1 for each in cases.values() for case in each)
    steps += len(memory.RANKS) * len(memory.STRATEGIES)

    def write() -> str:
        return write_report(given.out, "bench_peers", record, markdown)

    collect(record, written(measure(cases), write), steps)
    print(write())


def written(events: Iterator[Event], write: Callable[[], object]) -> Iterator[Event]:
    """Pass events on; write what is known between the cases, which take long."""
    for kind, value in events:
        if kind == "chosen":
            write()
        yield kind, value


def measure(cases: dict[int, list[Case]]) -> Iterator[Event]:
    """Yield ("step", description), and values of the lists of the record."""
    for ranks, each in cases.items():
        yield from in_processes(ranks, time_peers, each)
    for name, ranks in product(memory.STRATEGIES, memory.RANKS):
        yield from in_processes(ranks, memory.peak_memory, name)


def time_peers(put: Any, cases: list[Case]) -> None:
    """Put medians of all peers in all cases, in seconds of the slowest rank."""
    ranks = dist.get_world_size()
    checked: dict[tuple[str, Mask], list[Peer]] = {}
    for case in cases:
        kind = {"ranks": ranks, "dtype": case.dtype, "mask": case.mask.value}
        if (case.dtype, case.mask) not in checked:
            peers, reasons = take_part(case.dtype, case.mask)
            checked[case.dtype, case.mask] = peers
            for name, reason in reasons.items():
                put(("left_out", {**kind, "peer": name, "reason": reason}))
        kind["tokens"] = case.tokens
        put(("chosen", {**kind, "peer": chosen(case, ranks)}))
        for times in turns(put, case, checked[case.dtype, case.mask]):
            put(("times", {**kind, **times}))


def turns(put: Any, case: Case, peers: list[Peer]) -> Iterator[dict[str, Any]]:
    """Yield the medians of each peer that is not too slow for the case."""
    whole = make_whole(case.tokens, DTYPES[case.dtype])
    seconds: dict[str, list[tuple[float, ...]]] = {p.name: [] for p in peers}
    what = f"{dist.get_world_size()} ranks, {case.dtype}, {case.mask.value}"
    warm_up = case.tokens < LONG_TOKENS
    for rep in range(0 if warm_up else 1, case.reps + 1):
        put(("step", f"{what}, {case.tokens} tokens, {rep} of {case.reps}"))
        for peer in peers:
            if peer.slow and (rep % SLOW_SHARE != 1 or case.tokens > SLOW_TOKENS):
                continue
            found = time_once(peer, shards(peer, whole))
            if rep:
                seconds[peer.name].append(found)
    for name, each in seconds.items():
        if each:
            medians = map(statistics.median, zip(*each, strict=True))
            times = dict(zip(("forward", "both", "processor"), medians, strict=True))
            yield {"peer": name, **times, "repetitions": len(each)}


def take_part(dtype: str, mask: Mask) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that compute attention right, and why the others do not."""
    whole = make_whole(CHECK_TOKENS, DTYPES[dtype])
    packed = mask is Mask.PACKED
    expected = exact(whole, documents.visible(CHECK_TOKENS) if packed else None)
    alone = one_process(mask)
    bound = ALLOWED_ERRORS * relative_error(results(alone, whole), expected)
    if dtype == "float32":
        bound = max(bound, FLOAT32_ERROR)
    peers, reasons = [], {}
    for offer in (*own_offers(), *package_offers()):
        peer, reason = checked(offer, mask, whole, expected, bound)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, reason)
        first = next((x for x in found if x is not None), None)
        if peer is not None and first is None:
            peers.append(peer)
        else:
            reasons[offer.name] = str(first)
    return peers, reasons


def checked(
    offer: Offer,
    mask: Mask,
    whole: list[Tensor],
    expected: list[Tensor],
    bound: float,
) -> tuple[Peer | None, str | None]:
    """Return the peer, or in one line why it cannot be compared here.

    Whatever another package raises is such a reason; ours have to work.
    """
    try:
        peer = offer.make(mask)
        if peer.layout == "whole" and dist.get_rank() > 0:
            return peer, None
        found = results(peer, shards(peer, whole))
    except LeftOut as error:
        return None, str(error)
    except Exception as error:
        if offer.name in OURS:
            raise
        sentence = " ".join(str(error).split()).partition(". ")[0]
        return None, f"{type(error).__name__}: {sentence}"
    names = ("results", "gradient of q", "gradient of k", "gradient of v")
    errors = {
        name: relative_error([x], [reference])
        for name, x, reference in zip(names, found, shards(peer, expected), strict=True)
    }
    wrong = [name for name, error in errors.items() if not error <= bound]
    if not wrong:
        return peer, None
    assert offer.name not in OURS, f"{offer.name}: {errors}, allowed {bound:.1e}"
    return None, f"wrong {', '.join(wrong)}"


def results(peer: Peer, operands: list[Tensor]) -> tuple[Tensor, ...]:
    """Compute out, dq, dk and dv."""
    *qkv, grad = operands
    saved = peer.forward(*qkv)
    return saved[0], *peer.backward(grad, *qkv, *saved)[:3]


def time_once(peer: Peer, operands: list[Tensor]) -> tuple[float, float, float]:
    """Return seconds of the forward and of both passes, barrier to barrier.

    The third number is processor seconds of both passes on the rank that uses most, per
    thread: other processes on the machine add nothing to them.
    """
    *qkv, grad = operands
    idle = peer.layout == "whole" and dist.get_rank() > 0
    torch.set_num_threads(peer.threads)
    dist.barrier()
    start, used = time.perf_counter(), time.process_time()
    saved = () if idle else peer.forward(*qkv)
    dist.barrier()
    middle = time.perf_counter()
    if not idle:
        peer.backward(grad, *qkv, *saved)
    processor = torch.tensor((time.process_time() - used) / peer.threads)
    dist.barrier()
    end = time.perf_counter()
    torch.set_num_threads(1)
    dist.all_reduce(processor, dist.ReduceOp.MAX)
    return middle - start, end - start, processor.item()


def shards(peer: Peer, whole: list[Tensor]) -> list[Tensor]:
    """Return this rank's tokens of `whole` in the layout and dimensions of `peer`."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mine = whole
    if peer.layout == "contiguous":
        mine = [x.chunk(ranks, 2)[rank].contiguous() for x in whole]
    elif peer.layout == "head_tail":
        parts = [x.chunk(2 * ranks, 2) for x in whole]
        mine = [torch.cat((x[rank], x[2 * ranks - 1 - rank]), 2) for x in parts]
    if peer.tokens_first:
        mine = [x.transpose(1, 2).contiguous() for x in mine]
    return mine


def chosen(case: Case, ranks: int) -> str:
    """Name the one of OURS that the cost model chooses on this machine."""
    workload = Workload(
        batch=BATCH,
        heads=HEADS,
        kv_heads=HEADS,
        q_len=case.tokens,
        kv_len=case.tokens,
        head_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        bytes_per_element=DTYPES[case.dtype].itemsize,
        causal=True,
        direction=Direction.BOTH,
        ranks=ranks,
        live_fraction=documents.live_fraction(case.mask, case.tokens),
        masked=case.mask is Mask.PACKED,
    )
    profile = profile_for_device("cpu", ranks=ranks)
    plan = choose(workload, profile, layouts=tuple(Layout), runnable=True)
    names = {form: name for name, form in OURS.items()}
    for each in plan.candidates:
        strategy = each.strategy
        layout = Layout.CONTIGUOUS if strategy is Strategy.ULYSSES else each.layout
        if (strategy, layout) in names:
            return names[strategy, layout]
    raise AssertionError("the cost model lists ring, all_gather and ulysses")
