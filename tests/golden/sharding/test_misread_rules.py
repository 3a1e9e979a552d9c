"""Calls whose rules mistake what is split, or what parts are."""

import pytest
import torch
import torch.nn.functional as F

from tests.golden.capture import body, inside, sharded, warnings
from tests.golden.golden_text import assert_golden
from tests.support.this_torch import skip_if_combined


def test_a_norm_is_combined_at_once(mesh):
    captured = sharded(lambda x: -x.norm(dim=1), mesh)
    assert_golden(
        inside(captured),
        """\
norm = .norm(cp_shard, dim=1)
cp_reduce_partial = cp_reduce_partial(norm)
neg = neg(cp_reduce_partial)""",
    )


def test_flags_are_combined_at_once(mesh):
    skip_if_combined(how_many, mesh)
    captured = sharded(lambda x: x.sum() * (x > 0).any(1).sum(), mesh)
    assert_golden(
        inside(captured),
        """\
sum_1 = .sum(cp_shard)
gt = gt(cp_shard, 0)
any_1 = .any(gt, 1)
cp_reduce_partial = cp_reduce_partial(any_1)
sum_2 = .sum(cp_reduce_partial)
mul = mul(sum_1, sum_2)""",
    )


def test_maxima_and_sums_wait(mesh):
    captured = sharded(lambda x: x.amax(1).sum() + x.sum(), mesh)
    assert "cp_reduce_partial" not in body(captured)


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
    skip_if_combined(call, mesh)
    captured = sharded(lambda x: call(x), mesh)
    assert f"cp_replicated({call.__name__}, " in body(captured)
    assert "it would add up what is no sum over the ranks" in warnings(caplog)[0]


def test_a_call_that_gives_them_is_not(mesh, caplog):
    captured = sharded(lambda x: norm(x), mesh)
    assert "cp_replicated" not in body(captured)
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda x: F.adaptive_avg_pool2d(x, (5, 7)),
            "rows of an image without a batch",
        ),
        (lambda x: F.conv1d(x, x[:1, :, :3]), "a part of the weight for all of it"),
    ],
    ids=["image", "weight"],
)
def test_a_rule_that_mistakes_what_is_split(mesh, caplog, call, problem):
    weight = torch.nn.Parameter(torch.ones(8))
    sharded(lambda x: call(x * weight), mesh)
    assert any(problem in text for text in warnings(caplog))


def test_images_with_a_batch_are_split(mesh, caplog):
    weight = torch.nn.Parameter(torch.ones(8))

    def pooled(x):
        x = (x * weight).unflatten(2, (2, 4)).unsqueeze(0).flatten(0, 1)
        return F.adaptive_avg_pool2d(x, (1, 2))  # the sequence is the channels

    captured = sharded(pooled, mesh)
    assert "adaptive_avg_pool2d" in captured.text and not warnings(caplog)


def test_a_gradient_is_summed_for_a_backward_that_writes_into_it(mesh):
    weight = torch.nn.Parameter(torch.ones(8))

    def scaled(x):
        x = x * weight
        return x / x.std(1, keepdim=True)

    assert_golden(
        inside(sharded(scaled, mesh)),
        """\
x = mul(cp_shard, cp_replicate)
std = .std(x, 1, keepdim=True)
cp_pin = cp_pin(std)
truediv = truediv(x, cp_pin)""",
    )
