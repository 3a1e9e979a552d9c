"""The tables of this benchmark: times, ratios against their targets, memory."""

from __future__ import annotations

from typing import Any

from tools.results import at_least, at_most, markdown_table, setup_text

OURS = ("cp_ring", "cp_all_gather", "cp_ring_zigzag", "cp_all_gather_zigzag")
TORCH_RINGS = ("torch_ring", "torch_ring_all_gather", "torch_ring_balanced")


def markdown(record: dict[str, Any]) -> str:
    """The whole report."""
    setup = record["setup"]
    lines = [
        "# Attention alone, 2 ranks of one thread",
        "",
        f"{setup['shape']}; {setup_text(setup)}. Medians of {setup['reps']} "
        "interleaved repetitions (naive loop: a third of them) of the slowest rank. "
        "Printed by `tools/in_venv python -m tools.bench attention`.",
        "",
        "cp_ring and cp_all_gather: this package, contiguous layout, or zigzag. "
        "torch_ring: "
        "torch's private ring templates around the same CPU kernel, contiguous, "
        "rotating by all-to-all; torch_ring_all_gather: the same with torch's default, "
        "one gather; torch_ring_balanced: all-to-all and head-tail order. naive_loop: "
        "a ring in plain PyTorch with materialised scores. two_threads: one process "
        "with two threads, the whole sequence.",
        "",
        *times_table(record["times"]),
        "",
        "## Against the targets",
        "",
        *targets_table(record["times"]),
        "",
        "## Balance",
        "",
        *balance(record["times"], setup["ranks"]),
        "",
        "## Peak memory per rank",
        "",
        *memory_table(record["memory"]),
        "",
    ]
    return "\n".join(lines)


def seconds(times: list[dict[str, Any]], peer: str, tokens: int, what: str) -> float:
    """One measured median."""
    row = next(r for r in times if r["peer"] == peer and r["tokens"] == tokens)
    value: float = row[what]
    return value


def lengths(times: list[dict[str, Any]]) -> list[int]:
    """The measured lengths, in their order."""
    return list(dict.fromkeys(row["tokens"] for row in times))


def times_table(times: list[dict[str, Any]]) -> list[str]:
    """Milliseconds, forward / forward and backward."""
    rows = []
    for peer in dict.fromkeys(row["peer"] for row in times):
        cells = [
            f"{seconds(times, peer, n, 'forward') * 1e3:.0f} / "
            f"{seconds(times, peer, n, 'both') * 1e3:.0f}"
            for n in lengths(times)
        ]
        rows.append([peer, *cells])
    head = ["ms, forward / both", *(f"{n} tokens" for n in lengths(times))]
    return markdown_table(head, rows)


def targets_table(times: list[dict[str, Any]]) -> list[str]:
    """Each target with what was measured, met or missed by how much."""
    rows = []
    for n in lengths(times):
        for mine in OURS:
            for what in ("forward", "both"):
                own = seconds(times, mine, n, what)
                place = [str(n), mine, what]
                for peer in ("torch_ring", "torch_ring_all_gather"):
                    ratio = own / seconds(times, peer, n, what)
                    rows.append([*place, *at_most(f"time / {peer}", ratio, 1.1)])
                ratio = own / seconds(times, "torch_ring_balanced", n, what)
                rows.append(
                    [*place, *at_most("time / torch_ring_balanced", ratio, 1.1)]
                )
                ratio = seconds(times, "naive_loop", n, what) / own
                rows.append([*place, *at_least("speed / naive_loop", ratio, 5.0)])
                if n == max(lengths(times)):
                    ratio = seconds(times, "two_threads", n, what) / own
                    rows.append([*place, *at_least("speed / two_threads", ratio, 0.8)])
    return markdown_table(
        ["tokens", "ours", "pass", "ratio", "target", "got", "verdict"], rows
    )


def balance(times: list[dict[str, Any]], ranks: int) -> list[str]:
    """The loss that the contiguous layout explains, beside the loss that is seen."""
    loss = 2 - 1 / ranks
    rows = [
        [
            str(n),
            mine,
            "1.00" if mine.endswith("zigzag") else f"{loss:.2f}",
            *(
                f"{seconds(times, mine, n, what) / seconds(times, peer, n, what):.2f}"
                for peer in ("two_threads", "torch_ring_balanced")
                for what in ("forward", "both")
            ),
        ]
        for n in lengths(times)
        for mine in OURS
    ]
    head = [
        "tokens",
        "ours",
        "2 - 1/N",
        "forward / two_threads",
        "both / two_threads",
        "forward / balanced",
        "both / balanced",
    ]
    return [
        "The last of N contiguous ranks has 2 - 1/N times the mean causal work. If a "
        f"score cost the same everywhere, the time would be {loss:.2f} of that of "
        f"balanced work, and the rate {1 / loss:.2f} of it. Measured:",
        "",
        *markdown_table(head, rows),
    ]


def memory_table(memory: list[dict[str, Any]]) -> list[str]:
    """MiB of the largest rank; each line ran in fresh processes."""
    rows = [
        [
            row["strategy"],
            str(row["ranks"]),
            str(row["tokens"]),
            *(f"{row[name]:.0f}" for name in ("shard_mib", "growth_mib", "peak_mib")),
        ]
        for row in memory
    ]
    head = ["strategy", "ranks", "tokens", "q+k+v+grad", "growth", "peak of process"]
    return [
        "MiB of the largest rank, forward and backward, each line in fresh processes; "
        "growth is over the peak that the process had with its operands and after a "
        "short call.",
        "",
        *markdown_table(head, rows),
    ]
