"""Which attention patterns are folded, which stay, and what is said of them."""

from __future__ import annotations

import pytest
import torch

from cpcompile.accounting.graph_account import Purpose
from cpcompile.reporting.explanation import Explanation
from cpcompile.reporting.graph_report import AttentionShare
from tests.golden.capture import capture, localised
from tests.support.forms.attention_pattern_forms import FORMS, TWINS, Model

TOKENS = torch.zeros(2, 16, dtype=torch.long)


def captured(name, mesh):
    model = Model((FORMS | TWINS)[name])
    return capture(model, TOKENS, mesh=mesh, strategy="auto")


@pytest.mark.parametrize("name", FORMS)
def test_inputs_are_inferred(mesh, name):
    found = captured(name, mesh)
    assert found["fold_attention_patterns"].rewrites == 2
    assert len(found.ctx.findings.plans) == 2
    (given,) = [x for x in found.ctx.inputs.values() if x.dim is not None]
    assert (given.name, given.dim) == ("tokens", 1)
    assert not found.ctx.findings.unmatched_attention


NOT_KNOWN = "it is of no form that is known"
LEFT = [
    *("shifted_before_sinks", "raised_before_sinks"),
    *("shape_read_elsewhere", "over_rows"),
    *("refilled_less", "refilled_another_mask"),
]
ROW_PARALLEL = {
    "temperature_of_keys": NOT_KNOWN,
    "weights_read_again": "its weights are read more than once",
    "scaled_until_it_hides_nothing": NOT_KNOWN,
    "added_to_a_low_number": NOT_KNOWN,
    "shifted_by_columns": NOT_KNOWN,
}
OTHERS = [name for name in TWINS if name not in (*LEFT, *ROW_PARALLEL)]


@pytest.mark.parametrize("name", [*OTHERS, *LEFT])
def test_what_stays_is_named_if_it_is_over_a_sequence(mesh, name):
    """With the reason, for a warning."""
    found = captured(name, mesh)
    step = found["fold_attention_patterns"]
    assert (step.rewrites, step.changed) == (0, False)
    reasons = [why for _, why in found.ctx.findings.unmatched_attention]
    assert reasons == [NOT_KNOWN] * 2 * (name in LEFT)
    assert name in OTHERS or not found.ctx.findings.row_parallel


def reported(name, mesh):
    """No scores leave whole, but the logits alone, of tokens that one input has."""
    report = localised(Model((FORMS | TWINS)[name]), TOKENS, mesh=mesh).report
    assert [str(x) for x in report.inputs] == ["tokens dim 1 (inferred)"]
    (logits,) = report.gathered
    assert logits.endswith(" [2, 16, 37]")
    # What is shifted is padded by a column, in which tokens are taken to begin.
    assert len(report.began) <= (name == "shifted_before_sinks")
    return report


@pytest.mark.parametrize("name", [*ROW_PARALLEL, "shifted_before_sinks"])
def test_what_is_computed_by_rows(mesh, name):
    """With weights that cannot be read: inputs are inferred for it."""
    report, why = reported(name, mesh), ROW_PARALLEL.get(name, NOT_KNOWN)
    assert report.by_hand == (AttentionShare("<top level>", "rows", why),) * 2
    assert report.calls == ()
    explained = str(Explanation((report,)))
    assert f"attention by hand, rows of own queries: <top level>: {why}" in explained


EXPLAINED = {
    "softcapped": ("causal, softcap 2", "aten_math"),
    "with_sinks": ("causal, sinks", "aten_flash"),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_what_is_explained(mesh, name):
    report = reported(name, mesh)
    assert [(x.mask, x.kernel) for x in report.calls] == [EXPLAINED[name]] * 2
    assert not report.account.exchanges(Purpose.VALUE)


class Squared(torch.autograd.Function):
    """An activation with a backward of its own, as Bloom has one."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * grad * x


def test_tokens_come_through_an_autograd_function(mesh):
    """Dynamo hands its two graphs to one operator, by which tokens are traced, too."""

    def attend(tokens, table):
        x = Squared.apply(torch.nn.functional.embedding(tokens, table))
        weights = (x @ x.transpose(1, 2)).softmax(-1)
        return x + weights @ x

    tokens = torch.zeros(2, 16, dtype=torch.long)
    table = torch.nn.Parameter(torch.randn(7, 8))
    found = capture(attend, tokens, table, mesh=mesh, strategy="auto")
    assert found.error is None
    assert found["fold_attention_patterns"].rewrites == 1
    assert [x.dim for x in found.ctx.inputs.values() if x.dim is not None] == [1]
