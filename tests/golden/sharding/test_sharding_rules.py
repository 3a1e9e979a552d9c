"""Calls that DTensor would do wrong or not at all on a sharded sequence."""

import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.golden.capture import capture, inside, sharded, warnings, without_lines
from tests.golden.golden_text import assert_golden

CATS = {  # of nothing, as caches of keys begin, and of tokens
    "dropped": (
        lambda x: torch.cat((torch.empty(0), x, x + 1), dim=2),
        "[cp_shard, add], dim=2",
    ),
    "by keyword": (
        lambda x: torch.cat(dim=2, tensors=[torch.empty(0), x, x]),
        "tensors=[cp_shard, cp_shard]",
    ),
    "stays": (lambda x: torch.cat([x, x], 2), "[cp_shard, cp_shard], 2"),
}


@pytest.mark.parametrize("case", CATS)
def test_an_empty_tensor_is_dropped_from_cat(mesh, case):
    call, operands = CATS[case]
    assert operands in sharded(call, mesh).lines("= cat(")


def test_a_join_with_an_empty_tensor_alone_is_none(mesh):
    captured = sharded(lambda x: torch.cat([torch.empty(0), x], 1), mesh)
    assert "cat(" not in captured.text


# mean


@pytest.mark.parametrize(
    "mean",
    [
        lambda x: x.mean(1),
        lambda x: torch.mean(x, dim=-2),
        lambda x: x.mean(dim=(1,)),
    ],
)
def test_mean_over_the_sequence(mesh, mean):
    """A sum over a global count; 15 tokens are split unevenly."""
    captured = sharded(mean, mesh, 2, 15, 8)
    assert captured.text.count("= cp_mean(cp_shard, ") == 1


def test_mean_of_everything(mesh):
    captured = sharded(lambda x: (x * x).mean(), mesh)
    assert_golden(
        inside(captured),
        """\
mul = mul(cp_shard, cp_shard)
cp_mean = cp_mean(mul, None, False, None)""",
    )


def test_repeated_tokens_stay_split(mesh):
    """Those that experts get, as in Llama 4, are a call on rows (fold_moe_dispatch)."""
    captured = sharded(lambda x: x.repeat(1, 3, 1).sin(), mesh, 1, 35, 8)
    assert_golden(
        captured.lines("cp_repeat", "sin"),
        """\
repeat = cp_repeat(cp_shard, (1, 3, 1), 1)  # [1, 105, 8] _S(1, 3)
sin = .sin(repeat)  # [1, 105, 8] _S(1, 3)
cp_gather = cp_gather(sin)  # [1, 105, 8]""",
    )


STAYS = {
    "mean": (lambda x: x.mean(-1, keepdim=True), "= .mean(cp_shard, -1, keepdim=True)"),
    "repeat": (lambda x: x.repeat(2, 1, 3), "= .repeat(cp_shard, 2, 1, 3)"),
}


@pytest.mark.parametrize("case", STAYS)
def test_calls_over_other_dimensions_stay(mesh, case):
    call, line = STAYS[case]
    assert line in sharded(call, mesh).text


# dropout


def test_dropout_in_training(mesh):
    captured = sharded(lambda x: F.dropout(x, 0.1), mesh)
    assert_golden(
        inside(captured),
        """\
cp_dropout_mask = cp_dropout_mask(cp_shard, 0.1)
cp_replicate = cp_replicate(cp_dropout_mask)
mul = mul(cp_shard, cp_replicate)""",
    )


def test_dropout_of_what_lies_otherwise_in_memory(mesh):
    """One device draws numbers in the order of its memory."""
    captured = sharded(lambda x: F.dropout(x.transpose(0, 2), 0.1), mesh)
    (line,) = captured.lines("= cp_dropout_mask(").splitlines()
    assert "(transpose, 0.1, (2, 1, 0))" in line


def test_dropout_of_one_row_lies_in_order(mesh):
    """The twin: where a dimension of size 1 lies makes no difference."""
    captured = sharded(lambda x: F.dropout(x.transpose(0, 1), 0.1), mesh, 1, 16, 8)
    assert "= cp_dropout_mask(transpose, 0.1)" in captured.text


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.1, False)])
def test_dropout_that_does_nothing(mesh, p, training):
    captured = sharded(lambda x: F.dropout(x, p, training).relu(), mesh)
    assert "dropout" not in captured.text
    assert "= .relu(cp_shard)" in captured.text


@pytest.mark.parametrize(
    "draw",
    [torch.rand_like, torch.bernoulli, lambda x: torch.dropout(x, 0.5, True)],
    ids=["rand_like", "bernoulli", "torch_dropout"],
)
def test_other_random_calls_are_not_left_to_each_rank(mesh, draw):
    """One device draws all numbers from one stream; see cp_dropout."""
    captured = sharded(lambda x: draw(x) * x, mesh)
    assert not re.search(r"= (rand_like|bernoulli|dropout)\(cp_shard", captured.text)


def test_dropout_of_plain_tensors_stays(mesh):
    captured = sharded(
        lambda x, y: (x.relu(), F.dropout(y)), mesh, more=(torch.ones(3),)
    )
    assert "= dropout(l_y_)" in captured.text


# operators without a rule


def test_an_operator_without_a_rule_is_gathered_for(mesh, caplog):
    """And its result is sharded again where it was."""
    captured = sharded(lambda x: torch.renorm(x, 2, 0, 1.0).relu(), mesh)
    assert_golden(
        inside(captured),
        """\
cp_replicated = cp_replicated(renorm, cp_shard, 2, 0, 1)
cp_shard_1 = cp_shard(cp_replicated, 1)
relu = .relu(cp_shard_1)""",
    )
    (text,) = warnings(caplog)
    assert_golden(
        without_lines(text),
        """\
renorm at <top level> (LINE) runs on gathered tensors, because DTensor cannot shard it
    here (DTensor has no sharding rule for aten.renorm); the result is correct, only
    slower""",
    )


def test_a_result_of_another_shape_stays_replicated(mesh):
    captured = sharded(lambda x: torch.cdist(x[:, :4], x).relu(), mesh)
    assert captured.text.count("= cp_replicated(cdist, ") == 1
    assert "= .relu(cp_replicated)" in captured.text


def test_trifles_are_no_reason_for_a_warning(mesh, caplog):
    """Below 1 MiB and 1 % of what the graph makes, here a number per token."""
    fn = lambda x: (torch.renorm(x[..., 0], 2, 0, 1.0), x.relu())  # noqa: E731
    sharded(fn, mesh, 2, 16, 512)
    assert not warnings(caplog)
    sharded(fn, mesh, 2, 16, 8)
    assert len(warnings(caplog)) == 1


def test_the_warning_comes_once(mesh, caplog):
    fn = lambda x: torch.renorm(x, 2, 0, 1.0)  # noqa: E731  one line, one warning
    assert sharded(fn, mesh).text == sharded(fn, mesh).text
    assert len(warnings(caplog)) == 1


def test_what_every_rank_has_is_no_reason_for_a_warning(mesh, caplog):
    """A sum over the tokens is not sharded, and nothing is gathered for its calls."""
    captured = sharded(lambda x: torch.renorm(x.sum(1), 2, 0, 1.0), mesh)
    assert captured.text.count("cp_replicated(renorm, ") == 1
    assert warnings(caplog) == []


class Renormed(nn.Module):
    def forward(self, x):
        return torch.renorm(x, 2, 0, 1.0)


def test_a_line_is_named_once(mesh, caplog):
    """However many layers run it."""
    layers = nn.Sequential(Renormed(), Renormed(), Renormed())
    captured = sharded(lambda x: layers(x), mesh)
    assert captured.text.count("= cp_replicated(renorm, ") == 3
    assert len(warnings(caplog)) == 1


def test_operators_with_a_rule_warn_of_nothing(mesh, caplog):
    captured = sharded(lambda x: F.layer_norm(x.relu(), (8,)), mesh)
    assert "cp_replicated" not in captured.text
    assert warnings(caplog) == []


# embedding


def look_up(ids, table):
    return F.embedding(ids, table), ids.cumsum(1)


def test_ids_are_sharded_at_the_embedding(mesh):
    """What else is made of them stays plain."""
    ids, table = torch.randint(9, (2, 16)), torch.randn(9, 8)
    captured = capture(look_up, ids, table, mesh=mesh, shard={"ids": 1})
    assert_golden(
        inside(captured),
        """\
embedding = embedding(cp_shard, cp_replicate)
cumsum = .cumsum(l_ids_, 1)""",
    )


def test_an_embedding_of_other_ids_stays(mesh):
    ids, table = torch.randint(9, (2, 16)), torch.randn(9, 8)
    captured = capture(look_up, ids, table, mesh=mesh, until="shard_graph")
    assert captured["shard_graph"].rewrites == 0
    assert not captured["shard_graph"].changed


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * grad + 0 * x


def test_a_function_with_its_own_backward(mesh, caplog):
    """Dynamo makes one operator of it, which takes both graphs as arguments."""

    def f(x):
        return Doubled.apply(x.relu()) + 1

    x = torch.randn(2, 16, 8, requires_grad=True)
    captured = capture(f, x, mesh=mesh, shard={"x": 1})
    assert captured.error is None
    assert "= autograd_function_apply(fwd_body_0, bwd_body_0, arg, " in captured.text
    assert captured.lines("= add(").endswith("# [2, 16, 8] S(1)")
    assert not warnings(caplog)
