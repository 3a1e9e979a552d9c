"""Section g: what the step kernels have to reach on an H200, and what they do reach.

"bf16 D=128 8K x 8K" is B=1, H=16. Rates count 4 operations per visible (query, key)
pair and head dim forward, 2.5 times as many for dkdv and dq together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DIM, TOKENS = 128, 8192
FORWARD_TFLOPS, BACKWARD_TFLOPS = 450.0, 300.0
RING_TOKENS = 32768
RING_RATIOS = {4: 0.97, 8: 0.92}  # ranks -> of the time of one causal attention

Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # of each section


@dataclass(frozen=True)
class Target:
    """A target of at least `needed`; `got` is None where it was not measured."""

    name: str
    needed: float
    got: float | None

    @property
    def met(self) -> bool | None:
        return None if self.got is None else self.got >= self.needed

    @property
    def verdict(self) -> str:
        if self.got is None:
            return "not measured"
        distance = self.got / self.needed - 1
        return f"met by {distance:.1%}" if self.met else f"missed by {-distance:.1%}"


def targets(rows: Rows) -> list[Target]:
    """List all targets, in a fixed order."""
    rates = [row for row in rows.get("b", ()) if "tflops" in row]
    block = {"dim": DIM, "tokens": TOKENS, "causal": False}
    forward = _tflops(rates, block | {"direction": "forward"})
    backward = _tflops(rates, block | {"direction": "backward"})
    shape = "bf16 D=128 8K x 8K full"
    found = [
        Target(f"{title} of {shape}, TFLOP/s", needed, values.get(name))
        for title, needed, values, name in (
            ("forward", FORWARD_TFLOPS, forward, "step"),
            ("forward with accumulators", FORWARD_TFLOPS, forward, "step_acc"),
            ("backward", BACKWARD_TFLOPS, backward, "backward"),
            ("backward with accumulators", BACKWARD_TFLOPS, backward, "backward_acc"),
        )
    ]
    own, flex = forward.get("step"), forward.get("flex")
    same = own / flex if own and flex else None
    found.append(Target(f"forward of {shape} / FlexAttention", 1.0, same))
    worst, where = _worst_of_flex(rates)
    found.append(Target(f"forward / FlexAttention, worst shape{where}", 1.0, worst))
    found += [
        Target(
            f"{title} / zigzag ring, S=32K N={ranks}",
            needed,
            _ring_ratio(rows.get("d", ()), ranks, name),
        )
        for title, name in (
            ("one attention by the fastest kernel", "zigzag"),
            ("one attention by the same kernel", "zigzag of ours"),
        )
        for ranks, needed in RING_RATIOS.items()
    ]
    checks = [row for key in ("a", "d", "f") for row in rows.get(key, ())]
    # An item that raised says nothing about a result, so it counts as wrong.
    results = [row for row in checks if "passed" in row or "error" in row]
    right = sum(bool(row.get("passed")) for row in results)
    share = right / len(results) if results else None
    name = f"share of right results ({right} of {len(results)})"
    return [*found, Target(name, 1.0, share)]


def _tflops(rates: Sequence[Mapping[str, Any]], want: Mapping[str, Any]) -> Any:
    matching = (r for r in rates if all(r[name] == x for name, x in want.items()))
    return next((row["tflops"] for row in matching), {})


def _worst_of_flex(rates: Sequence[Mapping[str, Any]]) -> tuple[float | None, str]:
    ratios = [
        (row["tflops"]["step"] / row["tflops"]["flex"], str(row["item"]))
        for row in rates
        if row["direction"] == "forward" and {"step", "flex"} <= set(row["tflops"])
    ]
    if not ratios:
        return None, ""
    ratio, where = min(ratios)
    return ratio, f" ({where}, of {len(ratios)})"


def _ring_ratio(
    rings: Sequence[Mapping[str, Any]], ranks: int, name: str
) -> float | None:
    for row in rings:
        if (row.get("tokens"), row.get("ranks")) == (RING_TOKENS, ranks):
            ratio = row.get("ratios", {}).get(name)
            if ratio is not None:
                return float(ratio)
    return None
