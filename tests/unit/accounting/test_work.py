"""Work of one device is what torch counts, and repeated work is found by its line."""

import logging
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import cpcompile as cp
from cpcompile.accounting.graph_account import (
    Account,
    GraphAccount,
    GraphDirection,
    Kind,
    Purpose,
)
from cpcompile.reporting import lost_parallelism
from cpcompile.reporting.explanation import Explanation
from cpcompile.reporting.graph_report import recording
from tests.golden.capture import fake_mesh
from tests.support import one_attention
from tests.support.one_attention import WIDTH, Model, mean_loss, sliced

RANKS, BATCH = 4, 2


def accounts(model: nn.Module, tokens: Tensor, **options) -> tuple[GraphAccount, ...]:
    with fake_mesh(RANKS) as mesh, recording() as reports:
        given = {"mesh": mesh, "inner": "aot_eager", **options}
        torch.compile(model, backend="cp", options=given)(tokens)
    (report,) = reports
    return report.accounts


def of_one_device(model: nn.Module, tokens: Tensor) -> dict[GraphDirection, float]:
    """Products as torch counts them, and attention, of which it counts none here."""
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    length = tokens.shape[1]
    attention = 4 * BATCH * WIDTH * length * (length + 1) / 2
    return {
        GraphDirection.FORWARD: forward.get_total_flops() + attention,
        GraphDirection.BACKWARD: backward.get_total_flops() + 2.5 * attention,
    }


CASES = {  # tokens, options, work of all ranks over that of one device
    **{
        x: (32, {"strategy": x}, 1.0)
        for x in ("ring", "all_gather", "ulysses", "hybrid")
    },
    # Rank 1 has 8 of 29 tokens, which is more than a fourth.
    "uneven": (29, {"strategy": "ring"}, 8 * RANKS / 29),
    # Its rings are unrolled.
    "inductor": (32, {"strategy": "ring", "inner": "inductor"}, 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_work_counts_as_tokens_lie(name: str) -> None:
    torch.manual_seed(0)
    length, options, ratio = CASES[name]
    model, tokens = Model(mean_loss), torch.randint(64, (BATCH, length))
    wanted = of_one_device(model, tokens)
    for account in accounts(model, tokens, layout="contiguous", **options):
        assert account.work.whole_flops == pytest.approx(wanted[account.direction])
        assert account.work.ratio == pytest.approx(ratio)
        assert account.work.repeated == () or ratio > 1


def test_a_forward_is_shared_out_and_what_it_saves_is_counted() -> None:
    # Without gradients autograd numbers no calls, and all have the same number.
    model, tokens = Model(mean_loss), torch.randint(64, (BATCH, 32))
    wanted = of_one_device(model, tokens)[GraphDirection.FORWARD]
    with torch.no_grad():
        (account,) = accounts(model, tokens, strategy="ring", layout="contiguous")
    assert account.work.whole_flops == pytest.approx(wanted)
    assert account.work.ratio == pytest.approx(1.0)
    # Bytes of a rank that grow with its tokens; inputs of the graph do not count.
    model = Model(mean_loss)
    saved = [
        sum(x.saved_bytes for x in accounts(model, tokens, strategy="ring"))
        for tokens in (torch.randint(64, (BATCH, length)) for length in (32, 64))
    ]
    assert 0 < saved[0] < saved[1] <= 2 * saved[0]
    operands = 3 * BATCH * (32 // RANKS) * WIDTH * 4  # q, k and v
    assert saved[0] > operands


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_what_leaves_the_graph_is_a_result(layout: str) -> None:
    """In a balanced layout tokens are put in order after they are gathered."""
    model = Model(lambda logits, tokens: logits)
    options = {"strategy": "ring", "layout": layout}
    forward, _ = accounts(model, torch.randint(64, (BATCH, 32)), **options)
    purposes = {x.purpose for x in forward.exchanges if x.kind is Kind.ALL_GATHER}
    assert purposes == {Purpose.RESULT}


def test_work_in_tiles_is_shared_out() -> None:
    """A tile computes the gradient of the head in the forward."""
    model, tokens = Model(mean_loss, 256), torch.randint(256, (BATCH, 1024))
    wanted = of_one_device(model, tokens)
    with cp.config.patch(tile_least_megabytes=0.1):
        found = accounts(model, tokens, strategy="ring", tile=64)
    assert sum(x.work.whole_flops for x in found) == pytest.approx(sum(wanted.values()))
    for account in found:
        assert account.work.ratio == pytest.approx(1.0)
    forward = next(x.work for x in found if x.direction is GraphDirection.FORWARD)
    assert forward.whole_flops > 1.2 * wanted[GraphDirection.FORWARD], "no tiles"


def test_repeated_work_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """Gathered gradients of logits have every rank run a product on all tokens."""
    model, tokens = Model(sliced), torch.randint(64, (BATCH, 32))
    wanted = of_one_device(model, tokens)
    forward, backward = accounts(model, tokens, strategy="ring", layout="contiguous")
    assert forward.work.ratio == pytest.approx(1.0)
    head = 2 * BATCH * 32 * WIDTH * 64  # of one of its gradients
    whole = wanted[GraphDirection.BACKWARD]
    assert backward.work.whole_flops == pytest.approx(whole)
    assert backward.work.ratio == pytest.approx((whole + (RANKS - 1) * head) / whole)
    (line,) = backward.work.repeated
    assert line.what == "head" and line.line.file == one_attention.__file__
    assert line.repeated_flops(RANKS) == pytest.approx((RANKS - 1) * head)
    assert Account((forward, backward)).work().ratio > 1.2
    values = [x for x in forward.exchanges if x.purpose is Purpose.VALUE]
    assert (values[0].kind, values[0].line.function) == (Kind.ALL_GATHER, "sliced")
    assert not warnings(caplog)  # it is less than 1 MiB


@pytest.mark.parametrize("loss", [mean_loss, sliced])
def test_one_warning_names_each_line_that_repeats_work(
    caplog: pytest.LogCaptureFixture, loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    model, tokens = Model(loss, 2048), torch.randint(64, (BATCH, 256))
    accounts(model, tokens, strategy="ring", layout="contiguous")
    if loss is mean_loss:
        assert not warnings(caplog)
        return
    (text,) = warnings(caplog)
    assert text.startswith("forward: the 4 ranks together do 1.00") and "-100" in text
    assert text.count(f"{one_attention.__file__}:") == 1 == text.count("(gathers ")
    caplog.clear()
    with mock.patch.multiple(lost_parallelism, LEAST_BYTES=0, LEAST_PART=0.0):
        accounts(Model(loss), tokens[:, :32], strategy="ring", layout="contiguous")
    assert sum(x.count("work is done again") for x in warnings(caplog)) == 1


def test_explanation_has_the_ratio() -> None:
    model, tokens = Model(sliced), torch.randint(64, (BATCH, 32))
    with fake_mesh(RANKS) as mesh:
        options = {"mesh": mesh, "inner": "aot_eager"}
        step = torch.compile(model, backend="cp", options=options)
        explanation: Explanation = cp.explain(step, tokens)
    assert explanation.work_ratio(GraphDirection.FORWARD) == pytest.approx(1.0)
    assert explanation.work_ratio() > 1.2
    text = str(explanation)
    assert "over that of one device: 1.00 in the forward" in text
    assert '"purpose": "value"' in explanation.to_json()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]
    return [text for text in texts if "ranks together" in text]
