"""`python -m tools.bench`: its commands, tables and shares of made-up times."""

import pytest
import torch
from expecttest import assert_expected_inline

from tools.bench.__main__ import MODULES, main
from tools.bench.operands import exact, make_whole
from tools.bench.peers import documents
from tools.bench.peers.documents import Mask
from tools.bench.peers.report import targets
from tools.bench.step.shares import WHOLE, Call, shares

TOKENS = 64


def row(peer, both, **more):
    kind = {"ranks": 2, "dtype": "float32", "mask": "causal", "tokens": 16384}
    times = {"peer": peer, "forward": both / 2, "both": both, "processor": both}
    return kind | times | more


def test_targets_are_of_two_ranks_and_of_what_is_chosen():
    of_two = {"cp_ulysses": 10.0, "cp_ring_zigzag": 8.0, "torch_ring": 9.0}
    of_two |= {"deepspeed_ulysses": 16.0, "naive_loop": 70.0, "one_process": 9.6}
    times = [*(row(*x) for x in of_two.items()), row("torch_ring", 1.0, ranks=4)]
    record = {"times": times, "chosen": [row("cp_ulysses", 0.0)]}
    lines = [x for x in targets(record) if "| both |" in x]
    assert_expected_inline(
        "\n".join(lines),
        """\
| float32 | causal | 16384 | both | cp_ulysses | time / torch_ring | <= 1 | 1.11 | missed by 11.1% | cp_ring_zigzag | 1.25 |
| float32 | causal | 16384 | both | cp_ulysses | speed / one_process | >= 0.95 | 0.96 | met | cp_ring_zigzag | 1.25 |
| float32 | causal | 16384 | both | cp_ulysses | speed / naive_loop | >= 8 | 7.00 | missed by 12.5% | cp_ring_zigzag | 1.25 |""",  # noqa: E501
    )


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


def call(name, start, end):
    """Times in seconds."""
    return Call(name, int(start * 1e9), int((end - start) * 1e9))


def test_a_moment_belongs_to_the_innermost_known_call():
    found = shares(
        [
            call("before the step", 0, 1),
            call(WHOLE, 1, 12),
            call("cp::ring_attention", 2, 5),
            call("cp::ring_wait", 3, 4),
            call("aten::mm", 4, 4.5),  # of attention
            call("aten::addmm", 5, 6),
            call("aten::empty", 5.2, 5.4),
            call("_c10d_functional::wait_tensor", 6, 8),
            call("Optimizer.step#AdamW.step", 9, 11),
            call("aten::mul", 9, 10),
        ]
    )
    assert found == {
        "attention": 2,
        "matrix products": 1,
        "other token-wise work": 3,
        "optimizer": 2,
        "gradient reduction": 2,
        "waits for messages": 1,
    }
