"""Write calls and candidates in words and rows, as everything prints them."""

from __future__ import annotations

from collections.abc import Sequence

from cpcompile.cost.plans.workload import Candidate, Strategy, Workload
from cpcompile.geometry.degrees import CPDegrees

CANDIDATE_HEADER = (
    *("strategy", "degrees", "layout", "ms/layer", "exposed ms", "hidden ms"),
    *("wire MB", "extra MiB", "kernels", "excluded because"),
)
_PASSES = {"both": "forward and backward"}


def candidate_row(candidate: Candidate) -> tuple[str, ...]:
    """Return one candidate, in the columns of CANDIDATE_HEADER."""
    return (
        candidate.strategy_name,
        degrees_text(candidate),
        candidate.layout.value,
        milliseconds(candidate.seconds),
        milliseconds(candidate.exposed_seconds),
        milliseconds(candidate.hidden_seconds),
        _scaled(candidate.wire_bytes, 1e6),
        _scaled(candidate.peak_extra_bytes, 2**20),
        "" if candidate.kernels is None else str(candidate.kernels),
        candidate.excluded or "",
    )


def degrees_text(candidate: Candidate) -> str:
    """Return the degrees in words: "8", "8, 4 groups", "2 in 4 (ring)" of a hybrid."""
    degrees: CPDegrees = candidate.degrees
    if candidate.strategy is Strategy.HYBRID:
        return str(degrees)
    if candidate.head_groups > 1:
        return f"{degrees.ranks}, {candidate.head_groups} groups"
    return str(degrees.ranks)


def ranks_text(ranks: int) -> str:
    """Return "1 rank" or "8 ranks"."""
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def workload_text(workload: Workload) -> str:
    """Describe the sizes of a call in a few words."""
    value = workload.value_dim
    heads = (
        f"{workload.heads} query and {workload.kv_heads} key/value heads"
        if workload.heads != workload.kv_heads
        else f"{workload.heads} heads"
    )
    tokens = f"{workload.q_len} tokens"
    if workload.kv_len != workload.q_len:
        tokens += f" on {workload.kv_len} keys"
    dims = f"head dim {workload.head_dim}"
    if value != workload.head_dim:
        dims += f" ({value} of values)"
    passes = _PASSES.get(workload.direction.value, workload.direction.value)
    return (
        f"{tokens}, batch {workload.batch}, {heads}, {dims}, "
        f"{8 * workload.bytes_per_element} bits per element, "
        f"{'causal' if workload.causal else 'not causal'}, {passes}"
    )


def text_table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Align rows in columns, numbers to the right; the first row is the header."""
    columns = [_aligned(column) for column in zip(*rows, strict=True)]
    lines = [indent + "  ".join(cells) for cells in zip(*columns, strict=True)]
    return "\n".join(line.rstrip() for line in lines)


def is_number(text: str) -> bool:
    """Tell whether a text is digits with at most one point."""
    return text.replace(".", "", 1).isdigit()


def _aligned(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    if any(column[1:]) and all(is_number(cell) for cell in column[1:] if cell):
        return [cell.rjust(width) for cell in column]
    return [cell.ljust(width) for cell in column]


def milliseconds(seconds: float | None) -> str:
    """Write a time in ms with three decimals; "" for what has no time."""
    return "" if seconds is None else f"{1e3 * seconds:.3f}"


def duration(seconds: float) -> str:
    """Write a time, such as "5.991 s" or "187.209 ms"."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.3f} ms"


def _scaled(count: int | None, unit: float) -> str:
    return "" if count is None else f"{count / unit:.1f}"
