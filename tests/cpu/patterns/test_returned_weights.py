"""Attention whose weights are returned is computed by rows of queries, and exact."""

import pytest
import torch
import torch.nn.functional as F

from cpcompile.logs import warn_once
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import compare_calls, warnings
from tests.cpu.attention_cases import compiled_on
from tests.cpu.model_cases import VOCABULARY, llama
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations


def build(dtype):
    torch.manual_seed(0)
    model = llama(attn_implementation="eager").to(dtype)
    ids = torch.randint(0, VOCABULARY, (2, 24))
    return model, {"input_ids": ids, "labels": ids}


def values(call, model, inputs):
    result = call(**inputs, output_attentions=True, use_cache=False)
    (result.loss + sum(x.square().sum() for x in result.attentions)).backward()
    found = {"loss": result.loss.detach(), "logits": result.logits.detach()}
    weights = {f"weights {i}": x.detach() for i, x in enumerate(result.attentions)}
    named = model.named_parameters()
    return found | weights | {f"grad of {n}": p.grad for n, p in named}


@pytest.mark.parametrize("world", [2, 3])
@on_ranks("world")
def test_they_are_exact_and_row_parallel(world):
    warn_once.cache_clear()
    exact, rough = (
        values(model, model, inputs)
        for model, inputs in map(build, (torch.float64, torch.float32))
    )
    exact = {name: x.double() for name, x in exact.items()}
    model, inputs = build(torch.float32)
    with recording() as reports, warnings() as texts:
        found = values(compiled_on(world, model), model, inputs)
    check(deviations(found, exact, rough))
    assert sum(len(report.by_hand) for report in reports) == 2
    assert any("is computed by rows of queries" in x for x in texts), texts


class Beside(torch.nn.Module):
    """Weights of nn.MultiheadAttention, between causal attention in a layout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        self.shown = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(2))
        self.head = torch.nn.Linear(16, VOCABULARY)

    def attend(self, x, layer):
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in layer.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = self.attend(x, self.qkv[0](x))
        padding = tokens == 0
        y, weights = self.shown(x, x, x, key_padding_mask=padding)
        x = x + y
        x = self.attend(x, self.qkv[1](x))
        return self.head(x), weights


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@on_ranks("world")
def test_beside_causal_attention(layout, world):
    """What is laid out comes to it, and leaves it, in natural order."""
    model = Beside().double()
    tokens = torch.arange(2 * 25).reshape(2, 25) % (VOCABULARY - 1) + 1
    tokens[0, -3:] = 0

    options = {"strategy": "ring", "layout": layout}
    found = compare_calls(model, [(tokens,)], world, **options)
    found.check()
    (report,) = found.reports
    assert [x.plan.layout.value for x in report.calls] == [layout] * 2
    assert len(report.by_hand) == 1
