"""What the ranks decide, on which knowledge of the machine, and that it runs."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from cpcompile import config
from tests.cpu.against_one_process import compare_calls
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import message_of

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


def plans_of(world: int, **options) -> list[tuple[str, str]]:
    """(strategy, hardware) per call, of gradients that equal one process."""
    inputs = [torch.randn(2, n, 128, dtype=torch.float64) for n in (24, 40)]
    calls = [[x.requires_grad_() for x in inputs]]
    options = {"shard": {"x": 1, "memory": 1}} | options
    found = compare_calls(Layers(), calls, world, **options)
    found.check()
    (report,) = found.reports
    return [(c.plan.chosen.label, c.plan.hardware) for c in report.calls]


@on_ranks(2)
def test_the_profile_of_rank_0_decides_for_all():
    with config.patch(hardware=FIRST if dist.get_rank() == 0 else OTHER):
        found = plans_of(2)
    assert {hardware for _, hardware in found} == {FIRST}
    answers: list = [None, None]
    dist.all_gather_object(answers, found)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("ring", "ulysses"), "hybrid 2 in 2 (ring)"),
        (("ulysses", "ring"), "hybrid 2 (ring) in 2"),
    ],
)
@on_ranks(4)
def test_a_mesh_of_two_axes(names, label):
    """Two calls are causal; a ring inside has its tokens in their order."""
    causal = label + " zigzag" * label.endswith("(ring)")
    options = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=names)}
    options |= {"axis": names, "strategy": "hybrid"}
    assert [chosen for chosen, _ in plans_of(4, **options)] == [causal, causal, label]


def message(world: int, budget: int | str = "auto", **options) -> str:
    """What is raised, on every rank alike."""
    with config.patch(memory_budget=budget):
        text = message_of(lambda: plans_of(world, **options))
    texts: list = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1
    return text


@on_ranks(4)
def test_axes_of_which_none_splits_heads():
    names = ("outer", "inner")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    text = message(4, mesh=mesh, axis=names)
    assert "needed one of both to be called 'ulysses'" in text


@on_ranks(2)
def test_what_nothing_fits():
    text = message(2, 10)
    assert "attention at" in text and "the smallest need" in text
    assert "memory_budget" in text
    text = message(2, strategy="hybrid")
    assert "strategy hybrid is impossible here: 2 ranks have no two factors" in text
