"""Streams of tokens that are joined and split are sharded again."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from cpcompile.passes.graph.cp_attention import is_cp_attention
from cpcompile.passes.graph.nodes import fake_value
from tests.golden.capture import capture, inside, sharded
from tests.golden.golden_text import assert_golden, lines_without
from tests.golden.operands import attend
from tests.models.families.joined_streams import MODELS


def nodes(captured):
    return captured.gm.graph.nodes


@pytest.mark.parametrize("mesh", [2, 4], indirect=True)
@pytest.mark.parametrize("name", MODELS)
def test_attention_and_what_lies_between_have_their_own_tokens(name, mesh):
    """Operands of attention are Shard(2); what every MLP computes is Shard(1)."""
    make, inputs, lengths = MODELS[name]
    captured = capture(make(), *inputs(), mesh=mesh)
    assert captured.error is None
    calls = [node for node in nodes(captured) if is_cp_attention(node)]
    assert [fake_value(c.args[0]).shape[2] for c in calls] == lengths
    for call in calls:
        for operand in call.args[:3]:
            assert fake_value(operand).placements == (Shard(2),)
    activations = [n for n in nodes(captured) if n.target is F.gelu]
    assert len(activations) >= 3
    for node in activations:
        assert fake_value(node).placements == (Shard(1),), node


def test_too_few_tokens_stay_whole(mesh):
    """9 tokens on 8 ranks: two each, and none for the last three."""

    def joined(x, y):
        return attend(torch.cat([F.gelu(x), F.gelu(y)], 1))

    captured = capture(joined, torch.randn(2, 23, 8), torch.randn(2, 9, 8), mesh=mesh)
    first, second = (n for n in nodes(captured) if n.target is F.gelu)
    assert fake_value(first).placements == (Shard(1),)
    assert type(fake_value(second)).__name__ == "FakeTensor"  # plain, on every rank


def test_a_class_token(mesh):
    token = torch.randn(1, 1, 8)

    def grown(x, token):
        x = torch.cat([token.expand(x.shape[0], -1, -1), x], 1)
        return attend(x, 2)[:, 1:].relu()

    captured = sharded(grown, mesh, 2, 36, 8, more=(token,))
    assert_golden(
        lines_without(inside(captured), "attention", "unflatten", "transpose"),
        """\
expand = .expand(l_token_, 2, -1, -1)
cp_move_tokens = cp_move_tokens([expand, cp_shard], 1, 'cat')
cp_move_tokens_1 = cp_move_tokens([flatten], 1, 'slice', 1, None, None)
relu = .relu(cp_move_tokens_1)""",
    )


def test_parameters_stay_whole(mesh):
    """Sixteen registers are joined with the tokens: only what comes of it is cut."""
    registers = torch.nn.Parameter(torch.randn(1, 16, 8))

    class Registers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.registers = registers

        def forward(self, x):
            return attend(torch.cat([self.registers.expand(2, -1, -1), x], 1), 2)

    captured = capture(Registers(), torch.randn(2, 24, 8), mesh=mesh)
    assert captured.text.count("= cp_shard(") == 1
    assert captured.text.count("= cp_move_tokens(") == 1


def test_a_gathered_value_that_leaves_the_graph_is_not_cut_again(mesh):
    """It would be gathered at once. Sequences of two dtypes are joined by DTensor."""

    def joined(x):
        return torch.cat([attend(x, 2), x.double()], 1)

    captured = sharded(joined, mesh, 2, 40, 8)
    assert captured.text.count("= cp_shard(") == 1
    captured = sharded(lambda x: joined(x).relu(), mesh, 2, 40, 8)
    assert captured.text.count("= cp_shard(") == 2


def test_one_token_stays_whole(mesh):
    captured = sharded(lambda x: attend(x, 2)[:, 0].relu(), mesh, 2, 36, 8)
    assert captured.text.count("= cp_shard(") == 1


def test_tokens_that_are_written_into_a_new_tensor(mesh):
    """As DeepSeek builds its keys."""

    def assembled(x):
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        k = q.new_empty(q.shape)
        k[..., :2] = q[..., :2] * 2
        k[..., 2:] = q[..., 2:]
        return F.scaled_dot_product_attention(q, k, q)

    captured = sharded(assembled, mesh, 2, 36, 8)
    (call,) = (n for n in nodes(captured) if is_cp_attention(n))
    assert [fake_value(x).placements for x in call.args[:3]] == [(Shard(2),)] * 3
