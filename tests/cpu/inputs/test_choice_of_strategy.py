"""What the ranks decide, on which knowledge of the machine, and that it runs."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import cpcompile as cp
from cpcompile import config
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import message_of
from tests.support.bounds import Values, check, deviations

FIRST = "rtx_4090"
OTHER = "h100_sxm"


class Layers(nn.Module):
    """A call with many key heads, one with a single key head, and a cross attention."""

    def forward(self, x, memory):
        q = x.unflatten(-1, (8, 16)).transpose(1, 2)
        one = q[:, :1]
        m = memory.unflatten(-1, (8, 16)).transpose(1, 2)
        many = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        grouped = F.scaled_dot_product_attention(
            many, one, one, is_causal=True, enable_gqa=True
        )
        crossed = F.scaled_dot_product_attention(grouped, m, m)
        return crossed.transpose(1, 2).flatten(2)


def plans_of(model, *args, **options):
    """(strategy, hardware) per call, and deviations of gradients."""
    torch._dynamo.reset()
    defaults = {"inner": "aot_eager", "shard": {"x": 1, "memory": 1}}
    step = torch.compile(model, backend="cp", options=defaults | options)
    given = [x.clone().requires_grad_() for x in args]
    explanation = cp.explain(step, *given)
    exact = gradients(model, [x.clone().double().requires_grad_() for x in args])
    rough = gradients(model, [x.clone().requires_grad_() for x in args])
    found = [(c.plan.chosen.label, c.plan.hardware) for c in explanation.calls]
    return found, deviations(gradients(step, given), exact, rough)


def gradients(call, given) -> Values:
    found = torch.autograd.grad(call(*given).square().sum(), given)
    return dict(zip(("grad of x", "grad of memory"), found, strict=True))


def operands(tokens=24, memory=40):
    torch.manual_seed(0)
    return torch.randn(2, tokens, 128), torch.randn(2, memory, 128)


@on_ranks(2)
def test_the_profile_of_rank_0_decides_for_all():
    config.hardware = FIRST if dist.get_rank() == 0 else OTHER
    try:
        found, errors = plans_of(Layers(), *operands(), mesh=sequence_mesh(2))
    finally:
        config.hardware = "auto"
    assert {hardware for _, hardware in found} == {FIRST}
    check(errors)
    answers: list = [None, None]
    dist.all_gather_object(answers, found)
    assert answers[0] == answers[1]


@on_ranks(2)
def test_a_wide_budget():
    with config.patch(memory_budget=1 << 40):
        assert plans_of(Layers(), *operands(), mesh=sequence_mesh(2))


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("ring", "ulysses"), "hybrid 2 in 2 (ring)"),
        (("ulysses", "ring"), "hybrid 2 (ring) in 2"),
    ],
)
@on_ranks(4)
def test_a_mesh_of_two_axes(names, label):
    options = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=names)}
    options |= {"axis": names, "strategy": "hybrid"}
    found, errors = plans_of(Layers(), *operands(), **options)
    assert [chosen for chosen, _ in found] == [label] * 3
    check(errors)


def message(budget: int | str = "auto", **options) -> str:
    """What is raised, on every rank alike."""
    with config.patch(memory_budget=budget):
        text = message_of(lambda: plans_of(Layers(), *operands(), **options))
    texts: list = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1
    return text


@on_ranks(2)
def test_a_budget_that_nothing_fits():
    text = message(10, mesh=sequence_mesh(2))
    assert "attention at" in text and "the smallest need" in text
    assert "memory_budget" in text


@on_ranks(4)
def test_axes_of_which_none_splits_heads():
    names = ("outer", "inner")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    text = message(mesh=mesh, axis=names)
    assert "needed one of both to be called 'ulysses'" in text


@on_ranks(2)
def test_a_hybrid_of_two_ranks():
    text = message(mesh=sequence_mesh(2), strategy="hybrid")
    assert "strategy hybrid is impossible here: 2 ranks have no two factors" in text
