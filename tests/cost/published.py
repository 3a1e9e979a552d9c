"""What published formulas and microbenchmarks say, beside what the model says."""

from dataclasses import dataclass

import sympy

from cpcompile.cost.compute import (
    balanced_pairs,
    last_rank_pairs,
    ring_step_seconds,
)
from cpcompile.cost.hardware.profile import HardwareProfile, load_profile
from cpcompile.cost.model import KV, QKV
from cpcompile.cost.plans import Direction, Workload
from cpcompile.cost.symbols import SYMBOLS, M, Sk, Sq, W, W_u, e, numbers, r, u
from cpcompile.geometry.degrees import CPDegrees
from cpcompile.geometry.layout import Layout
from tests.cost.scoring import table, workload
from tests.unit.cost.cost_cases import IDEAL, compiled

# Attention of the Striped Attention paper is in TF32 on A100, half as fast as bf16.
SLOWDOWNS = {"A100x8": 2.0, "TPUv3x8": 1.0, "TPUv4x16": 1.0}


@dataclass(frozen=True)
class Pair:
    """One published figure and ours, as both are printed."""

    name: str
    published: float
    ours: float


def balanced_speedups() -> list[Pair]:
    """Theoretical speedups of the Striped Attention paper, tables 3 to 8.

    The time of contiguous chunks over that of a balanced layout for a whole forward, if
    only FLOPs count. Per token, by the convention of the paper (Brandon et al., arXiv
    2311.09431): matrix products of the layers and of the output projection, with two
    products in the feed-forward, and causal attention over the whole sequence.
    """
    rows, common = table("striped_paper")
    chunks = (sum(last_rank_pairs(True)), balanced_pairs())
    pairs_of = sympy.lambdify((Sq, r), [x.subs(Sk, Sq) for x in chunks], "math")
    found = []
    for row in rows:
        size = common["models"][row["model"]]
        width, layers = size["d_model"], size["layers"]
        products = 4 * width * width + 2 * width * size["d_ff"]
        dense = layers * 2 * products + 2 * width * size["vocab"]
        of_pair = SLOWDOWNS[row["hw"]] * 4 * layers * width * row["sp"] / row["S_total"]
        slowest, even = (
            dense + of_pair * pairs for pairs in pairs_of(row["S_total"], row["sp"])
        )
        speedup = slowest / even
        name = f"{row['hw']} {row['model']} {row['mp']} x {row['sp']} {row['S_total']}"
        found.append(Pair(name, row["TMS"], round(speedup, 2)))
    return found


def hiding_chunks() -> list[Pair]:
    """Thousands of tokens per rank from which a step hides a hop, at peak rates."""
    rows, _ = table("ring_paper_min_block")
    found = []
    for row in rows:
        rates = {
            "forward_flops_per_second": row["TFLOPs"] * 1e12,
            "link_bytes_per_second": row["GBps_uni"] * 1e9,
        }
        load = workload(8, 8, 128, 8, Direction.FORWARD, causal=False)
        own = IDEAL.with_overrides(rates)
        _, step = ring_step_seconds(False, Layout.CONTIGUOUS, backward=False)
        # Of one token per rank: the hop grows with the chunk, the step with its square.
        tokens = at(e * KV / W, load, CPDegrees(1, 8), own)
        tokens /= at(step, load, CPDegrees(1, 8), own)
        found.append(Pair(row["hw"], row["min_block_ktok"], round(tokens / 1e3, 1)))
    return found


def copy_shares() -> list[Pair]:
    """Time of one copy of q, k and v over that of their all-to-all on 8 ranks.

    pytorch issue 178066, whose number of ranks is not known; our exchange copies twice.
    """
    rows, _ = table("ulysses_permute_cost")
    load = workload(65536, 32, 128, 8, Direction.FORWARD)
    found = []
    for row in rows:
        profile = load_profile(row["gpu"])
        copy, sent = 2 * e * QKV / M, e * QKV * (u - 1) / u / W_u
        share = at(copy / sent, load, CPDegrees(8, 1), profile)
        found.append(Pair(row["gpu"], row["permute_us"] / row["a2a_us"], share))
    return found


def at(
    expression: sympy.Expr, load: Workload, degrees: CPDegrees, profile: HardwareProfile
) -> float:
    """The expression with numbers."""
    values = numbers(load, degrees, profile)
    return float(compiled(expression)(*(values[symbol] for symbol in SYMBOLS)))
