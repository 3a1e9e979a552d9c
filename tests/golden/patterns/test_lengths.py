"""One compiled model is called with several lengths of the sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import flex_attention

from cpcompile.reporting.graph_report import recording
from tests.golden.capture import fake_group
from tests.support.forms.attention_pattern_forms import FORMS, Model
from tests.support.forms.flex_forms import gradients_on_cpu

LENGTHS = (17, 24, 33)


def with_dropout(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.25)


def flex(q, k, v):
    """A window, without a block mask, which would be of one length."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx - kv_idx < 5, score, -torch.inf)

    return flex_attention(q, k, v, score_mod=score_mod)


def flex_and_lse(q, k, v):
    out, lse = flex_attention(q, k, v, return_lse=True)
    return out * lse.unsqueeze(-1).sigmoid()


NAMES = ("softcapped", "with_sinks", "alibi")
OWN = {form.__name__: form for form in (with_dropout, flex, flex_and_lse)}
CALLED = OWN | {name: FORMS[name] for name in NAMES}


@pytest.mark.parametrize("name", CALLED)
def test_every_length_is_shared_out(name):
    """The second graph may have a symbol for the length, or every length its graph."""
    with fake_group(ranks=2), gradients_on_cpu():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        options = {"mesh": mesh, "inner": "aot_eager"}
        compiled = torch.compile(Model(CALLED[name]), backend="cp", options=options)
        for length in LENGTHS:
            tokens = torch.zeros(2, length, dtype=torch.long)
            with recording() as reports:
                logits = compiled(tokens)
                logits.square().mean().backward()
            assert logits.shape == (2, length, 37)
            (report,) = reports
            assert [call.plan is not None for call in report.calls] == [True] * 2
            assert [x.name for x in report.inputs] == ["tokens"]
            assert not report.by_hand
