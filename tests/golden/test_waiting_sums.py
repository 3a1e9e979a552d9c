"""Parts that DTensor would take for sums are combined before anything reads them."""

import pytest
import torch
from expecttest import assert_expected_inline

from tests.golden.capture import body, sharded, warnings


def test_a_norm_is_combined_at_once(mesh):
    captured = sharded(lambda x: -x.norm(dim=1), mesh)
    assert_expected_inline(
        body(captured),
        """\
cp_shard = cp_shard(l_x_, 1)
norm = .norm(cp_shard, dim=1)
cp_whole = cp_whole(norm)
neg = neg(cp_whole)
cp_gather = cp_gather(neg)
return (cp_gather,)""",
    )


def test_flags_are_combined_at_once(mesh):
    captured = sharded(lambda x: x.sum() * (x > 0).any(1).sum(), mesh)
    assert_expected_inline(
        body(captured),
        """\
cp_shard = cp_shard(l_x_, 1)
sum_1 = .sum(cp_shard)
gt = gt(cp_shard, 0)
any_1 = .any(gt, 1)
cp_whole = cp_whole(any_1)
sum_2 = .sum(cp_whole)
mul = mul(sum_1, sum_2)
cp_gather = cp_gather(mul)
return (cp_gather,)""",
    )


def test_maxima_and_sums_wait(mesh):
    captured = sharded(lambda x: x.amax(1).sum() + x.sum(), mesh)
    assert "cp_whole" not in body(captured)


@torch.compiler.allow_in_graph
def sum_of_norms(x):
    return x.norm(dim=1).sum()


@torch.compiler.allow_in_graph
def how_many(x):
    return (x > 0).any(1).float()


@torch.compiler.allow_in_graph
def norm(x):
    return x.norm(dim=1).clone()


@pytest.mark.parametrize("call", [sum_of_norms, how_many])
def test_a_call_that_adds_them_up_is_computed_on_gathered_tensors(mesh, caplog, call):
    captured = sharded(lambda x: call(x), mesh)
    assert f"cp_replicated_{call.__name__}" in body(captured)
    assert "it would add up what is no sum over the ranks" in warnings(caplog)[0]


def test_a_call_that_gives_them_is_not(mesh, caplog):
    captured = sharded(lambda x: norm(x), mesh)
    assert "cp_replicated" not in body(captured)
    assert not warnings(caplog)


def test_a_gradient_is_summed_for_a_backward_that_writes_into_it(mesh):
    weight = torch.nn.Parameter(torch.ones(8))

    def scaled(x):
        x = x * weight
        return x / x.std(1, keepdim=True)

    assert_expected_inline(
        body(sharded(scaled, mesh)),
        """\
cp_shard = cp_shard(l_x_, 1)
cp_replicate = cp_replicate(l_weight_)
x = mul(cp_shard, cp_replicate)
std = .std(x, 1, keepdim=True)
cp_pin = cp_pin(std)
truediv = truediv(x, cp_pin)
cp_gather = cp_gather(truediv)
return (cp_gather,)""",
    )
