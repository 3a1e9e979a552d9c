"""Workloads, an ideal machine and evaluation, for the tests of the cost model."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import sympy

from cpcompile.cost.hardware.profile import HardwareProfile, load_profile
from cpcompile.cost.plans import Direction, Workload
from cpcompile.cost.symbols import SYMBOLS, numbers
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout

H100 = load_profile("h100_sxm")
# One FLOP of a kernel, one byte of memory and one byte of a link take no time but where
# a test says so; nothing is lost at small sizes, and all transfers can be hidden.
IDEAL = replace(
    H100,
    name="ideal",
    softmax_head_dims=0.0,
    forward_row_overhead_keys=0.0,
    backward_row_overhead_keys=0.0,
    tile_tokens=0.0,
    parallel_tiles=0.0,
    kernel_launch_seconds=0.0,
    step_issue_seconds=0.0,
    merge_bytes_per_element=0.0,
    backward_merge_bytes_per_element=0.0,
    merge_latency_seconds=0.0,
    overlap_fraction=1.0,
    link_latency_seconds=0.0,
    collective_latency_seconds=0.0,
    collective_latency_per_rank_seconds=0.0,
    inter_node_latency_seconds=0.0,
    memory_bytes_per_second=1e40,
)
RATES = (
    "forward_flops_per_second",
    "causal_forward_flops_per_second",
    "backward_flops_per_second",
    "causal_backward_flops_per_second",
)
NO_COMPUTATION = replace(IDEAL, **dict.fromkeys(RATES, 1e40))


def workload(**changes: Any) -> Workload:
    """Small, with different numbers for everything; `length` sets both lengths."""
    fields: dict[str, Any] = {
        "batch": 2,
        "heads": 8,
        "kv_heads": 2,
        "q_len": 4096,
        "kv_len": 4096,
        "head_dim": 64,
        "value_dim": 32,
        "bytes_per_element": 2,
        "causal": False,
        "direction": Direction.FORWARD,
        "ranks": 4,
    }
    if "length" in changes:
        fields["q_len"] = fields["kv_len"] = changes.pop("length")
    return Workload(**{**fields, **changes})


LLAMA = workload(
    batch=1,
    heads=32,
    kv_heads=8,
    length=8192,
    head_dim=128,
    value_dim=128,
    causal=True,
    ranks=8,
)


def at(
    expression: sympy.Expr,
    profile: HardwareProfile = H100,
    degrees: CPDegrees | None = None,
    head_groups: int = 1,
    **changes: Any,
) -> float:
    """The expression with the numbers of a workload: those of a ring of all ranks."""
    load = workload(**changes)
    degrees = degrees or CPDegrees(1, load.ranks)
    values = numbers(load, degrees, profile, head_groups)
    return float(compiled(expression)(*(values[symbol] for symbol in SYMBOLS)))


@cache
def compiled(expression: sympy.Expr) -> Callable[..., float]:
    """The expression as a function of SYMBOLS."""
    function: Callable[..., float] = sympy.lambdify(SYMBOLS, expression, "math")
    return function


def positions(length: int, ranks: int, layout: Layout) -> list[list[int]]:
    """Positions of the tokens of every rank, by the definition of the layout."""

    def owner(position: int) -> int:
        if layout is Layout.CONTIGUOUS:
            return position // (length // ranks)
        if layout is Layout.STRIPED:
            return position % ranks
        if layout is Layout.FOLD:
            place = position % (2 * ranks)
        else:
            place = position // (length // (2 * ranks))
        return min(place, 2 * ranks - 1 - place)

    found: list[list[int]] = [[] for _ in range(ranks)]
    for position in range(length):
        found[owner(position)].append(position)
    return found


def seen(queries: list[int], keys: list[int]) -> int:
    """Causal pairs, counted one by one."""
    return sum(key <= query for query in queries for key in keys)
