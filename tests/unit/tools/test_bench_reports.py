"""`python -m tools.bench`: its commands, and tables of made-up times."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline

from tools.bench.__main__ import MODULES, main
from tools.bench.layouts.report import markdown
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


@pytest.mark.parametrize("name", MODULES)
def test_every_command_has_options_and_is_in_the_help(name, capsys):
    if name == "aot":
        pytest.importorskip("triton", reason="it compiles Triton kernels")
    printed = []
    for arguments in (["--help"], [name, "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        printed.append(capsys.readouterr().out)
    assert f"\n    {name} " in printed[0].partition("\n\n")[2]
    assert printed[1].startswith(f"usage: python -m tools.bench {name} ")


def rounds(layout, *walls, busy):
    """Rounds of two ranks; the backward takes twice as long as the forward."""
    return [
        {"layout": layout, "wall": [x, 2 * x], "busy": [[b, 2 * b] for b in busy]}
        for x in walls
    ]


def test_targets_of_layouts():
    rows = [
        *rounds("contiguous", 3.0, 4.0, 9.0, busy=(1.0, 3.0)),
        *rounds("zigzag", 2.0, 2.0, 9.0, busy=(2.0, 2.0)),
        *rounds("striped", 3.0, 3.0, 1.0, busy=(2.0, 2.5)),
    ]
    setup = dict.fromkeys(("torch", "python", "processor", "date", "shape"), "?")
    setup |= {"ranks": 2, "tokens": 64, "cores": 2, "reps": 3}
    setup["load_average"] = [0.1, 2.0]
    text = markdown({"setup": setup, "alone": rows, "shared": rows})
    assert "| striped | both | 6000 7500 | 1.25 | 9000 | 0.75 |" in text
    *_, rest = text.partition("## Against the targets\n\n")
    assert rest.startswith("Of ranks of their own. Equal work would take 0.67 of the")
    lines = [x for x in rest.splitlines() if "| both | " in x]
    assert_expected_inline(
        "\n".join(lines),
        """\
| zigzag | both | wall / contiguous | <= 0.65 | 0.50 | met |
| zigzag | both | busy, max / min | <= 1.15 | 1.00 | met |
| striped | both | wall / contiguous | <= 0.65 | 0.75 | missed by 15.4% |
| striped | both | busy, max / min | <= 1.15 | 1.25 | missed by 8.7% |""",
    )
