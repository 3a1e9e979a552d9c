"""What runs without being compiled, or is exported, of models with backend="cp"."""

import re

import pytest
import torch
import torch._dynamo
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor.parallel import parallelize_module

import cpcompile as cp
from cpcompile import logs
from cpcompile.errors import InputError, RecompileLimitError

X = torch.randn(1, 8, 4)
MESH_AXES = {"cp": 2}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x):
        y = self.project(x).unflatten(-1, (2, 2)).transpose(1, 2)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return y.transpose(1, 2).flatten(2)


@pytest.fixture
def options(mesh):
    return {"mesh": mesh, "shard": {"x": 1}, "inner": "aot_eager"}


def whole(options):
    return torch.compile(Attention(), backend="cp", options=options)


def in_place(options):
    model = Attention()
    model.compile(backend="cp", options=options)
    return model


def inside(options):
    return nn.Sequential(nn.Linear(4, 4), whole(options))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [whole, in_place, inside])
def test_what_is_compiled_is_not_exported(options, make, strict):
    """The program of one device is not what the user has."""
    with pytest.raises(InputError, match=r"\(Attention\) is compiled with backend"):
        torch.export.export(make(options), (X,), strict=strict)


def test_what_is_exported(options):
    style = cp.ContextParallel()
    model = parallelize_module(Attention(), options["mesh"], style)
    with pytest.raises(InputError, match=r"\(Attention\) is compiled with backend"):
        torch.export.export(model, (X,), strict=False)
    whole(options)
    exported = torch.export.export(Attention(), (X,))
    inductor = torch.export.export(torch.compile(Attention()), (X,))
    assert len(exported.graph.nodes) == len(inductor.graph.nodes)
    program = torch.export.export(Attention(), (X,)).module()
    compiled = torch.compile(program, backend="cp", options=options)
    explanation = cp.explain(compiled, X)
    assert len(explanation.calls) == 1
    assert explanation.calls[0].plan is not None


class Residual(Attention):
    """The factor is one of those that torch.compile keeps no symbol for."""

    factor = 0.0

    def forward(self, x):
        return torch.add(super().forward(x), x, alpha=self.factor)


def past_the_limit(options):
    """Yield calls of a model with other values; the third has no program of its own."""
    torch._dynamo.reset()
    logs.warn_once.cache_clear()
    model = Residual()
    compiled = torch.compile(model, backend="cp", options=options)
    with torch._dynamo.config.patch(recompile_limit=2), torch.no_grad():
        for n in range(4):
            model.factor = n / 8
            yield lambda: compiled(X), model(X)


def test_past_the_limit_of_programs_one_warning_names_the_value(options, caplog):
    calls = past_the_limit(options | {"strict": False})
    results = [(call(), in_one_process) for call, in_one_process in calls]
    torch.testing.assert_close(*results[-1])
    (warning,) = (x.getMessage() for x in caplog.records if x.name == "cpcompile")
    assert re.match(
        r"forward at .*test_skipped_frames.py:\d+ runs in eager, unsharded", warning
    )
    assert "it has 2 programs, the limit of torch.compile" in warning
    assert "what changed most is self.factor, in 2 of them" in warning
    assert "Pass a number that changes as a 0-dim tensor" in warning


def test_past_the_limit_of_programs_strict_raises_each_time(options):
    raised = []
    for call, _ in past_the_limit(options):
        try:
            call()
        except RecompileLimitError as error:
            raised.append(str(error))
    assert len(raised) == 2
    assert all("what changed most is self.factor" in text for text in raised)
