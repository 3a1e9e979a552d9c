"""Print what training steps of models exchange, and how their work is shared out.

Every model is unmodified, with random weights and a few small layers. It is compiled as
one rank of a group that exchanges nothing, so that a machine needs no ranks; what is
printed is what `cp.explain` lists. --write brings docs/results/accounts.md up to date.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

import cpcompile as cp
from cpcompile.accounting.graph_account import (
    Account,
    GraphAccount,
    GraphDirection,
    Purpose,
)
from cpcompile.apps.checking.fake_step import fake_ranks
from cpcompile.reporting.graph_report import recording
from tests.models.case import VOCABULARY, Case, without_dropout
from tests.models.families.decoders import GROUPED, default
from tests.models.steps import make_model
from tests.models.zoo import CASES
from tools.results import (
    RESULTS,
    markdown_table,
    print_table,
    setup,
    setup_text,
    write_report,
)

MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}
OTHERS = {  # classes of transformers, and sizes
    "minimax": ("MiniMax", GROUPED | {"num_local_experts": 4, "block_size": 16}),
    "bamba": (
        "Bamba",
        GROUPED
        | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16}
        | {"mamba_d_state": 16, "mamba_chunk_size": 16},
    ),
    "mamba": ("Mamba", MAMBA | {"state_size": 8}),
    "lfm2": ("Lfm2", GROUPED | {"layer_types": ["conv", "full_attention"]}),
}
NAMES = (
    *("llama/default", "gpt2/default", "mixtral/default", "deepseek_v3/default"),
    *("t5/default", "vit/classes", "sd3/joint", "flux/joint"),
    *(f"{name}/default" for name in OTHERS),
)


def other_case(name: str) -> Case:
    """Make a case for a decoder that the table of compatibility has no row for."""
    import transformers  # slow to import

    stem, sizes = OTHERS[name]

    def make() -> nn.Module:
        config = getattr(transformers, f"{stem}Config")(**sizes)
        made = without_dropout(config)
        module: nn.Module = getattr(transformers, f"{stem}ForCausalLM")(made)
        return module.train()

    return Case(f"{name}/default", "transformers", make, default, {"input_ids": 1})


@dataclass(frozen=True)
class Row:
    """One model: bytes that a rank receives in a step, and the work of all ranks."""

    model: str
    tokens: int
    attention: int
    gradients: int
    gathered: int
    others: int
    messages: dict[str, int]
    forward: float
    backward: float
    largest: str


def account(case: Case, ranks: int, length: int | None = None) -> list[GraphAccount]:
    """Return the accounts of a training step on one of `ranks` ranks."""
    torch._dynamo.reset()
    model, inputs = make_model(case), case.inputs(length or case.lengths[-1])
    with fake_ranks(ranks) as mesh:
        options = {"mesh": mesh, "inner": "aot_eager"}
        shard = {name: dim for name, dim in case.shard.items() if name in inputs}
        step = torch.compile(
            model, backend="cp", options=options | {"shard": shard, "strict": False}
        )
        with recording() as reports, case.around(), cp.config.patch(hardware="cpu"):
            step(**inputs)  # compiles the backward too
        return [x for report in reports for x in report.accounts]


def row(name: str, tokens: int, accounts: Sequence[GraphAccount]) -> Row:
    program = Account(accounts)
    received = program.received
    messages: dict[str, int] = {}
    for each in accounts:
        for kind, count in each.messages().items():
            messages[kind.value] = messages.get(kind.value, 0) + count
    largest = next(iter(program.exchanges(Purpose.VALUE, Purpose.RESULT)), None)
    known = received(Purpose.ATTENTION, Purpose.GRADIENT, Purpose.VALUE, Purpose.RESULT)
    ratios = [
        program.work(direction).ratio
        for direction in (GraphDirection.FORWARD, GraphDirection.BACKWARD)
    ]
    return Row(
        model=name,
        tokens=tokens,
        attention=received(Purpose.ATTENTION),
        gradients=received(Purpose.GRADIENT),
        gathered=received(Purpose.VALUE, Purpose.RESULT),
        others=received() - known,
        messages=messages,
        forward=ratios[0],
        backward=ratios[1],
        largest="" if largest is None else f"{largest.kind.value} {largest.line}",
    )


HEAD = (
    *("model", "tokens", "attention KiB", "gradients KiB", "values KiB", "others KiB"),
    *("exchanges", "work forward", "work backward", "largest value"),
)


def cells(found: Row) -> list[str]:
    sizes = (found.attention, found.gradients, found.gathered, found.others)
    messages = (f"{count} {kind}" for kind, count in found.messages.items())
    return [
        found.model,
        str(found.tokens),
        *(f"{size / 1024:.1f}" for size in sizes),
        ", ".join(messages),
        f"{found.forward:.2f}",
        f"{found.backward:.2f}",
        found.largest,
    ]


def markdown(record: dict[str, Any]) -> str:
    rows: list[Row] = record["rows"]
    return "\n".join(
        [
            "# What models exchange",
            "",
            f"A training step on {record['ranks']} ranks, aot_eager, width 64, two "
            f"layers, batch 2; {setup_text(record['setup'])}. Printed by "
            "`tools/in_venv python -m tools.accounts --write`. Sizes are what a rank "
            "receives from others; work is that of all ranks over that of one device, "
            f"where 1.00 is shared out and {record['ranks']}.00 is not. Models this "
            "small exchange more for their work than large ones; which lines do is the "
            "same.",
            "",
            *markdown_table(HEAD, map(cells, rows)),
            "",
        ]
    )


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        short = name.partition("/")[0]
        case = other_case(short) if short in OTHERS else CASES[name]
        length = case.lengths[-1]
        accounts = account(case, arguments.ranks)
        rows.append(row(name, length, accounts))
        print_table(name, HEAD, [cells(rows[-1])])
    record = {"setup": setup(), "ranks": arguments.ranks, "rows": rows}
    if arguments.write:
        write_report(RESULTS, "accounts", record, markdown)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
