"""`tools.bench peers`: its masks, and the tables of made-up times."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline

from tools.bench.operands import exact, make_whole
from tools.bench.peers import documents
from tools.bench.peers.documents import Mask
from tools.bench.peers.report import left_out, targets

TOKENS = 64


def row(peer, both, **more):
    kind = {"ranks": 2, "dtype": "float32", "mask": "causal", "tokens": 16384}
    return {
        **kind,
        "peer": peer,
        "forward": both / 2,
        "both": both,
        "processor": both,
        **more,
    }


def test_targets_are_of_two_ranks_and_of_what_is_chosen():
    times = [
        row("cp_ulysses", 10.0),
        row("cp_ring_zigzag", 8.0),
        row("torch_ring", 9.0),
        row("deepspeed_ulysses", 16.0),
        row("naive_loop", 70.0),
        row("one_process", 9.6),
        row("torch_ring", 1.0, ranks=4),
    ]
    record = {"times": times, "chosen": [row("cp_ulysses", 0.0)]}
    lines = [x for x in targets(record) if "| both |" in x]
    assert_expected_inline(
        "\n".join(lines),
        """\
| float32 | causal | 16384 | both | cp_ulysses | time / torch_ring | <= 1 | 1.11 | missed by 11.1% | cp_ring_zigzag | 1.25 |
| float32 | causal | 16384 | both | cp_ulysses | speed / one_process | >= 0.95 | 0.96 | met | cp_ring_zigzag | 1.25 |
| float32 | causal | 16384 | both | cp_ulysses | speed / naive_loop | >= 8 | 7.00 | missed by 12.5% | cp_ring_zigzag | 1.25 |""",  # noqa: E501
    )


def test_a_reason_is_one_line_for_all_cases():
    rows = [row("torch_ring", 0.0, dtype=x, reason="no mask") for x in ("a", "b")]
    rows.append(row("torch_ring", 0.0, dtype="a", ranks=4, reason="no mask"))
    assert left_out(rows)[2:] == [
        "| torch_ring | 2, 4 | a, causal; b, causal | no mask |"
    ]


def test_documents_are_seen_as_they_are_attended():
    """Three ways to say what a query sees: a dense mask, ranges, and separate calls."""
    whole = make_whole(TOKENS)
    visible = documents.visible(TOKENS)
    expected = exact(whole, visible)[0]
    out = documents.attend(Mask.PACKED)(*whole[:3])
    torch.testing.assert_close(out, expected.float())
    lower, upper = documents.key_ranges(TOKENS)[0].unbind(-1)
    key = torch.arange(TOKENS)
    assert torch.equal((key >= lower[:, None]) & (key < upper[:, None]), visible)
    pairs = TOKENS * (TOKENS + 1) / 2
    fraction = documents.live_fraction(Mask.PACKED, TOKENS)
    assert fraction == visible.sum().item() / pairs
