"""Write the tables of peers: times, ratios against their targets, memory."""

from __future__ import annotations

from typing import Any

from tools.bench.peers.attentions import NAIVE, ONE_PROCESS, OURS
from tools.results import at_least, at_most, busy_note, markdown_table, setup_text

Rows = list[dict[str, Any]]
JUDGED_RANKS = 2
FASTEST, FASTEST_FROM = 1.0, 4096
ALONE, ALONE_TOKENS = 0.95, 16384
LOOP = 8.0
PASSES = ("forward", "both", "processor")
KIND = ("ranks", "dtype", "mask")

LEGEND = (
    "cp_*: the operators of this package, as compiled programs call them; Ulysses has "
    "the contiguous layout. torch_ring: torch's private ring templates around the same "
    "CPU kernel, contiguous, rotating by all-to-all; torch_ring_all_gather: the same "
    "with torch's default, one gather; torch_ring_balanced: all-to-all and head-tail "
    "order. deepspeed_ulysses: DistributedAttention around torch's attention. "
    "ring_attention_pytorch: its ring for all devices, in plain PyTorch. naive_loop: a "
    "ring in plain PyTorch with materialised scores, all of them also for documents. "
    "one_process: the whole sequence, with as many threads as there are ranks. For "
    "documents one_process and deepspeed_ulysses call torch's attention once for each; "
    "cp_* read the mask in each call."
)


def markdown(record: dict[str, Any]) -> str:
    """Return the whole report as Markdown."""
    setup, times = record["setup"], record["times"]
    packages = ", ".join(f"{k} {v}" for k, v in setup["packages"].items())
    lines = [
        "# Attention alone, and its peers",
        "",
        f"{setup['sizes']}, ranks of one thread; {setup_text(setup)}; other packages: "
        f"{packages or 'none'}. Medians of {setup['reps']} interleaved repetitions, at "
        "most 3 from 8192 tokens on, of the slowest rank; of the loop and of "
        "contiguous rings of torch a third of them, up to 8192 tokens. Packed: 8 "
        "documents of uneven lengths, 0.15 of the pairs. Printed by "
        "`tools/in_venv python -m tools.bench peers`.",
        "",
        *busy_note(setup),
        LEGEND,
    ]
    for kind in unique(times, *KIND):
        ranks, dtype, mask = kind
        lines += ["", f"## {ranks} ranks, {dtype}, {mask}", ""]
        if ranks != JUDGED_RANKS:
            lines += [
                "More ranks than cores, for information: no target is judged.",
                "",
            ]
        lines += times_table(of(times, **dict(zip(KIND, kind, strict=True))))
    lines += ["", "## Against the targets", "", *targets(record), ""]
    lines += ["## Left out", "", *left_out(record["left_out"]), ""]
    lines += ["## Peak memory per rank", "", *memory_table(record["memory"]), ""]
    return "\n".join(lines)


def unique(rows: Rows, *names: str) -> list[tuple[Any, ...]]:
    """Return the different values of these fields, in their order."""
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def of(rows: Rows, **wanted: Any) -> Rows:
    """Return the rows with these values."""
    return [row for row in rows if all(row[k] == v for k, v in wanted.items())]


def times_table(times: Rows) -> list[str]:
    """Tabulate forward, and forward and backward, of one kind."""
    lengths = [n for (n,) in unique(times, "tokens")]
    rows = []
    for (peer,) in unique(times, "peer"):
        found = {row["tokens"]: row for row in of(times, peer=peer)}
        cells = [cell(found[n]) if n in found else "" for n in lengths]
        rows.append([peer, *cells])
    head = ["ms, forward / both (processor)", *(f"{n} tokens" for n in lengths)]
    return markdown_table(head, rows)


def cell(row: dict[str, Any]) -> str:
    """Write milliseconds of both passes, and in brackets those of the processor."""
    forward, both, processor = (
        f"{row[name] * 1e3:.0f}" for name in ("forward", "both", "processor")
    )
    return f"{forward} / {both} ({processor})"


def targets(record: dict[str, Any]) -> list[str]:
    """Compare the choice of the cost model, and the fastest of ours, with targets."""
    times = of(record["times"], ranks=JUDGED_RANKS)
    rows = []
    for dtype, mask, tokens in unique(times, "dtype", "mask", "tokens"):
        where = {"dtype": dtype, "mask": mask, "tokens": tokens}
        found = {row["peer"]: row for row in of(times, **where)}
        plan = of(record["chosen"], ranks=JUDGED_RANKS, **where)[0]["peer"]
        for what in PASSES:
            seconds = {name: row[what] for name, row in found.items()}
            best = min((x for x in seconds if x in OURS), key=seconds.__getitem__)
            for target in verdicts(seconds, plan, tokens):
                rows.append([dtype, mask, tokens, what, plan, *target])
                rows[-1].append(best if best != plan else "")
                ratio = seconds[plan] / seconds[best]
                rows[-1].append(f"{ratio:.2f}" if best != plan else "")
    head = ["dtype", "mask", "tokens", "pass", "chosen", "ratio", "target", "got"]
    head += ["verdict", "a faster one of ours", "chosen / it"]
    return [
        f"Of what the cost model chooses for {JUDGED_RANKS} ranks among the strategies "
        "above, for forward and backward together. processor: of both passes, the "
        "processor time of the rank that uses most. The fastest peer is "
        "one of the others on the same ranks, without the loop.",
        "",
        *markdown_table(head, rows),
    ]


def verdicts(seconds: dict[str, float], plan: str, tokens: int) -> list[list[str]]:
    """Return rows of targets of one case and pass."""
    found = []
    own = {*OURS, NAIVE, ONE_PROCESS}
    others = {name: x for name, x in seconds.items() if name not in own}
    if others and tokens >= FASTEST_FROM:
        fastest = min(others, key=others.__getitem__)
        ratio = seconds[plan] / others[fastest]
        found.append(at_most(f"time / {fastest}", ratio, FASTEST))
    if tokens == ALONE_TOKENS:
        ratio = seconds[ONE_PROCESS] / seconds[plan]
        found.append(at_least(f"speed / {ONE_PROCESS}", ratio, ALONE))
    if NAIVE in seconds:
        ratio = seconds[NAIVE] / seconds[plan]
        found.append(at_least(f"speed / {NAIVE}", ratio, LOOP))
    return found


def left_out(rows: Rows) -> list[str]:
    """List who could not take part, where, and why."""
    reasons = []
    for peer, reason in unique(rows, "peer", "reason"):
        cases = of(rows, peer=peer, reason=reason)
        where = [", ".join(map(str, kind)) for kind in unique(cases, *KIND[1:])]
        ranks = ", ".join(str(n) for (n,) in unique(cases, "ranks"))
        reasons.append([peer, ranks, "; ".join(where), reason.replace("|", "\\|")])
    return markdown_table(["peer", "ranks", "where", "reason"], reasons)


def memory_table(memory: Rows) -> list[str]:
    """Tabulate MiB of the largest rank; each line ran in fresh processes."""
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
        "MiB of the largest rank, float32, causal, forward and backward, each line in "
        "fresh processes; growth is over the peak that the process had with its "
        "operands and after a short call.",
        "",
        *markdown_table(head, rows),
    ]
