"""The measured tables as shapes, one function per table.

Left out, because they measure whole models or what is no strategy here: Meta's times to
the first token and pass-Q, NeMo, Llama 3, the largest contexts of the Ring Attention
paper, DoubleRing, and BurstAttention, whose backward rotates queries.
"""

from collections.abc import Callable
from itertools import groupby
from typing import Any

from cpcompile.cost.plans import Direction, Workload
from cpcompile.geometry.layout import Layout
from tests.cost.scoring import Score, Shape, all_gather, form, shape, table, workload

LAYOUTS = {
    "basic": Layout.CONTIGUOUS,
    "zigzag": Layout.ZIGZAG,
    "stripe": Layout.STRIPED,
    "ring_contiguous": Layout.CONTIGUOUS,
    "zigzag_ring": Layout.ZIGZAG,
    "stripe_ring": Layout.STRIPED,
}
DIRECTIONS = {"fwd": Direction.FORWARD, "fwd+bwd": Direction.BOTH}
# Ulysses takes 4.2 ms there, and 3.3 ms without packing, which sends the same bytes in
# more messages; in all other shapes packing is faster or as fast. No model of costs
# tells the two runs apart, so the score is given with this shape and without.
USP_OUTLIER = "8192 tokens, 32 heads of 32, qkvpack"
# Query heads and head dim of the models that the RFC names, by its f = Hkv / H: Wan2.2
# for 1, HunyuanImage 3 for the others. It does not say them beside its cells.
OMNI_SIZES = {1: (40, 128), 0.25: (32, 128), 0.125: (32, 128)}


def rings_of_flash_attention() -> Score:
    """The README of ring-flash-attention: three rings on 8 A100 and on 8 H800."""
    rows, common = table("rfa_readme")
    times: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        if row["strategy"] in LAYOUTS:
            each = form(1, common["world"], LAYOUTS[row["strategy"]])
            runs = times.setdefault((row["hw"], row["dir"]), [])
            runs.append((each, 1 / row["value"]))
    shapes = []
    for (machine, direction), runs in times.items():
        load = load_of(common | {"dir": direction})
        name = f"{machine}, {direction}"
        shapes.append(shape(name, load, machine.removeprefix("8x"), runs))
    return Score(tuple(shapes))


def load_of(row: dict[str, Any]) -> Workload:
    """The workload of a row of a table, with what is common to all of its rows."""
    sizes = (row["S_total"], row["h"], row["d"], row["world"], DIRECTIONS[row["dir"]])
    return workload(*sizes, batch=row["b"], kv_heads=row.get("hkv"))


def usp_on_a100() -> Score:
    """USP on 8 A100, forward: every factorisation of the ranks, in three layouts."""
    return _of_usp("usp_8xa100", "a100")


def usp_on_l20() -> Score:
    """The same on 8 L20, behind host bridges, with 1 and 4 query heads per key head."""
    return _of_usp("usp_8xl20", "l20")


def usp_on_a100_pcie() -> Score:
    """The same on 4 A100; its runs at 16K tokens were disturbed."""
    return _of_usp("usp_4xa100_pcie", "a100_pcie")


def _of_usp(name: str, hardware: str) -> Score:
    rows, common = table(name)
    fields = ("S_total", "h", "d", "packing", "hkv", "b")

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple((common | row)[x] for x in fields)

    shapes = []
    for values, group in groupby(sorted(rows, key=key), key):
        own = common | dict(zip(fields, values, strict=True))
        runs = [
            (form(x["ulysses"], x["ring"], LAYOUTS[x["layout"]]), 1 / x["value"])
            for x in group
        ]
        name = f"{own['S_total']} tokens, {own['h']} heads of {own['d']}"
        if len({each.label for each, _ in runs}) > 1:
            name = f"{name}, {own['packing']}"
            shapes.append(shape(name, load_of(own), hardware, runs))
    return Score(tuple(shapes))


def rings_on_4090() -> Score:
    """Contiguous and striped ring and Ulysses on 8 RTX 4090, both directions."""
    forms = {
        "ai_ring_4090": form(1, 8),
        "ai_stripe_4090": form(1, 8, Layout.STRIPED),
        "ai_ulysses_4090": form(8, 1),
    }
    times: dict[tuple[int, str], list[Any]] = {}
    for name, each in forms.items():
        rows, common = table(name)
        for row in rows:
            runs = times.setdefault((row["seq"], row["dir"]), [])
            runs.append((each, row["ms"] * 1e-3))
    shapes = []
    for (length, direction), runs in times.items():
        load = load_of(common | {"S_total": length, "dir": direction})
        shapes.append(shape(f"{length} tokens, {direction}", load, "rtx4090", runs))
    return Score(tuple(shapes))


def nodes_of_a800() -> Score:
    """Megatron's ring and USP, 8 in 4 (ring), on 4 nodes of 8 A800."""
    forms = {
        "Megatron-RingAttention": form(1, 32, Layout.ZIGZAG),
        "USP": form(8, 4, Layout.ZIGZAG),
    }
    return _of_a800(forms, multi_node=True)


def node_of_a800() -> Score:
    """Megatron's ring on one node: no choice, the times alone."""
    return _of_a800({"Megatron-RingAttention": form(1, 8, Layout.ZIGZAG)}, False)


def gather_or_ring_on_a800() -> Score:
    """vllm-omni on A800: the ring's time in units of the all-gather's."""
    rows, _ = table("vllm_omni_overlap_value")
    shapes = (_of_omni(row, x) for row in rows for x in (11, 13, 15, 16))
    return Score(tuple(shapes), relative=True)


def _of_a800(forms: dict[str, Any], multi_node: bool) -> Score:
    rows, common = table("burst_exp_data")
    times: dict[int, list[Any]] = {}
    loads = {}
    for row in rows:
        if row["multi_node"] is multi_node and row["impl"] in forms:
            length, each = row["S_total"], forms[row["impl"]]
            loads[length] = workload(
                length, common["h"], common["d"], each.degrees.ranks, Direction.BOTH
            )
            # 4 FLOPs per pair and dim forward, 10 backward, half of the pairs.
            flops = 7 * common["h"] * common["d"] * length**2
            seconds = flops / each.degrees.ranks / (row["tflops"] * 1e12)
            times.setdefault(length, []).append((each, seconds))
    return Score(tuple(shape(f"{n} tokens", loads[n], "a800", times[n]) for n in times))


def _of_omni(row: dict[str, Any], log_length: int) -> Shape:
    length, ranks, share = 2**log_length, row["sp"], row["f"]
    heads, dim = OMNI_SIZES[share]
    load = workload(
        length,
        heads,
        dim,
        ranks,
        Direction.FORWARD,
        kv_heads=round(heads * share),
        causal=False,
    )
    runs = [(all_gather(ranks), 1.0), (form(1, ranks), 1 - row[f"S{length}"] / 100)]
    hardware = "a800" if row["link"] == "NVLink" else "a800_pcie"
    return shape(
        f"{row['link']}, {ranks} ranks, f={share}, {length}", load, hardware, runs
    )


TABLES: dict[str, Callable[[], Score]] = {
    "ring-flash-attention README, 8 A100 and 8 H800": rings_of_flash_attention,
    "USP, 8 A100": usp_on_a100,
    "USP, 8 L20": usp_on_l20,
    "USP, 4 A100 on PCIe": usp_on_a100_pcie,
    "AI_analysis, 8 RTX 4090": rings_on_4090,
    "BurstEngine, 32 A800": nodes_of_a800,
    "BurstEngine, 8 A800": node_of_a800,
    "vllm-omni RFC 5092, 2 and 4 A800": gather_or_ring_on_a800,
}
