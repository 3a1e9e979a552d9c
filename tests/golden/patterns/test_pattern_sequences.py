"""Which attention patterns are folded, which stay, and what is said of them."""

from __future__ import annotations

import pytest
import torch

from cpcompile.reporting.explanation import Explanation
from cpcompile.reporting.graph_report import AttentionShare, GraphReport
from tests.golden.capture import capture
from tests.support.forms.attention_pattern_forms import FORMS, TWINS, Model


def captured(name, mesh):
    tokens = torch.zeros(2, 16, dtype=torch.long)
    model = Model((FORMS | TWINS)[name])
    return capture(model, tokens, mesh=mesh, strategy="auto")


@pytest.mark.parametrize("name", FORMS)
def test_inputs_are_inferred(mesh, name):
    """And no score has the whole sequence on both sides."""
    found = captured(name, mesh)
    assert found["fold_attention_patterns"].rewrites == 2
    assert len(found.ctx.findings.plans) == 2
    (given,) = [x for x in found.ctx.inputs.values() if x.dim is not None]
    assert (given.name, given.dim) == ("tokens", 1)
    assert found.ctx.findings.gathered_results == ["logits [2, 16, 37]"]
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


@pytest.mark.parametrize("name", ROW_PARALLEL)
def test_what_is_computed_row_parallel(mesh, name):
    """Scores that can be read, with weights that cannot: inputs are inferred for it."""
    found = captured(name, mesh)
    assert found["fold_attention_patterns"].rewrites == 2
    assert [why for _, why in found.ctx.findings.row_parallel] == [
        ROW_PARALLEL[name]
    ] * 2
    assert not (found.ctx.findings.unmatched_attention or found.ctx.findings.calls)
    assert found.ctx.findings.gathered_results == ["logits [2, 16, 37]"]
    assert found.text.count("= cp_gather_keys(") == 4


def test_what_is_explained(mesh):
    def reported(name):
        return GraphReport.of(captured(name, mesh).ctx, (), "")

    call, _ = reported("softcapped").calls
    assert (call.mask, call.kernel) == ("causal, softcap 2", "aten_math")
    call, _ = reported("with_sinks").calls
    assert call.mask == "causal, sinks"
    report = reported("weights_read_again")
    assert report.calls == ()
    why = "its weights are read more than once"
    assert report.by_hand == (AttentionShare("<top level>", "rows", why),) * 2
    explained = str(Explanation((report,)))
    assert f"attention by hand, rows of own queries: <top level>: {why}" in explained
    report = reported("shifted_before_sinks")
    assert report.by_hand == (AttentionShare("<top level>", "rows", NOT_KNOWN),) * 2


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
