"""Ranks that do other things, or in another order: an error on all, before they mix."""

import contextlib

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import cpcompile as cp
from tests.cpu.rank_check_cases import Model, compiled, error_of


def run_order(case):
    """What one rank does besides, or not; values are compared in first calls only."""
    rank = torch.distributed.get_rank()
    step, x = compiled(Model(), check_ranks="first")
    step(x).backward()
    if case == "length":
        torch._dynamo.config.automatic_dynamic_shapes = False
        try:
            longer = torch.cat([x, x], dim=1)
            step(longer).backward()
            return error_of(lambda: step(longer if rank else x))
        finally:
            torch._dynamo.config.automatic_dynamic_shapes = True

    def act():
        if case == "backward":
            loss = step(x)
            if rank == 0:
                loss.backward()
            step(x)
        elif case == "explain":
            if rank == 0:
                cp.explain(step, x)
            step(x).backward()
            step(x).backward()
        else:
            modes = {
                "no_grad": torch.no_grad(),
                "autocast": torch.autocast("cpu", torch.bfloat16),
            }
            with modes[case] if rank else contextlib.nullcontext():
                step(x).sum()

    return error_of(act)


ORDER = {
    "backward": ("rank 0 runs the backward of forward (", "rank 1 runs forward ("),
    "explain": ("rank 0 runs forward (", "rank 1 runs the backward of forward ("),
    "no_grad": ("rank 0 runs forward (", "rank 1 compiles forward"),
    "autocast": ("rank 0 runs forward (", "rank 1 compiles forward"),
    "length": ("x [1, 16, 8]), call 2", "x [1, 32, 8]), call 2"),
}


@pytest.mark.parametrize("case", list(ORDER))
def test_ranks_do_the_same_in_the_same_order(pools, case):
    texts = pools[2].run(run_order, case, timeout=100)
    for text in texts:
        assert "do different things: " in text
        for part in ORDER[case]:
            assert part in text


class Layers(nn.Module):
    """Layers that are called one by one after graph breaks, as one program."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = self.layer(x, layer)
        return x.sum().unsqueeze(0)

    @staticmethod
    def layer(x, layer):
        torch._dynamo.graph_break()
        y = layer(x)[:, None]
        return x + F.scaled_dot_product_attention(y, y, y)[:, 0]


def run_layers():
    """The last of three layers differs, in the second step."""
    rank = torch.distributed.get_rank()
    model = Layers()
    step, x = compiled(model, shard={"x": 1}, strict=False)
    first = error_of(lambda: step(x).backward())
    with torch.no_grad():
        model.layers[2].weight += rank
    return first, error_of(lambda: step(x))


def test_every_layer_counts_its_own_calls(pools):
    for first, second in pools[2].run(run_layers, timeout=120):
        assert first == ""
        assert "in call 2 of torch_dynamo_resume" in second
        assert "layer.weight: rank 0 has " in second
