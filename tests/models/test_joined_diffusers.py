"""Transformers of diffusers that join streams gather no tokens of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.testing import assert_close

from cpcompile.accounting.graph_account import (
    Exchange,
    GraphDirection,
    Kind,
    Purpose,
)
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import compiled_on
from tests.models.families.diffusion import HEADS, model
from tests.models.torchvision_schemas import define_schemas
from tests.support.bounds import default_dtype

TEXT, WIDE, POOLED = 24, 48, 40
PATCHED = HEADS | {"in_channels": 4, "out_channels": 4}

Inputs = dict[str, Any]


def inputs(shape: tuple[int, ...], *others: str) -> Inputs:
    """Latents of a shape, a time, a prompt, and what else a model takes."""
    given = {
        "hidden_states": torch.randn(1, *shape),
        "timestep": torch.randint(1, 900, (1,)),
        "encoder_hidden_states": torch.randn(1, TEXT, WIDE),
        "pooled_projections": torch.randn(1, POOLED),
        "encoder_attention_mask": torch.ones(1, TEXT),
        "guidance": torch.rand(1) * 1000,
        "num_frames": 2,
        "height": 8,
        "width": 8,
    }
    kept = ("hidden_states", "timestep", "encoder_hidden_states", *others)
    return {name: given[name] for name in kept}


# sd3, flux and wan: gradients in test_compatibility.py, gathers in the pipelines' tests
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], Inputs]]] = {
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        PATCHED
        | {"time_embed_dim": 32, "text_embed_dim": WIDE, "num_layers": 2}
        | {"sample_width": 12, "sample_height": 12, "sample_frames": 9}
        | {"patch_size": 2, "max_text_seq_length": TEXT},
        lambda: inputs((3, 4, 12, 12)),
    ),
    "hunyuan video": (
        "HunyuanVideoTransformer3DModel",
        PATCHED
        | {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1}
        | {"patch_size": 2, "patch_size_t": 1, "text_embed_dim": WIDE}
        | {"pooled_projection_dim": POOLED, "rope_axes_dim": (4, 6, 6)},
        lambda: inputs(
            (4, 3, 8, 12), "encoder_attention_mask", "pooled_projections", "guidance"
        ),
    ),
    "ltx": (
        "LTXVideoTransformer3DModel",
        PATCHED
        | {"cross_attention_dim": 64, "num_layers": 2, "caption_channels": WIDE},
        lambda: inputs(
            (128, 4), "encoder_attention_mask", "num_frames", "height", "width"
        ),
    ),
}


def step(call: Any, net: nn.Module, given: Inputs) -> dict[str, torch.Tensor]:
    net.zero_grad()
    result = call(**given, return_dict=False)[0]
    weights = torch.linspace(-1, 1, result.numel()).view(result.shape)
    (result.sin() * weights).sum().backward()
    grads = {n: p.grad for n, p in net.named_parameters()}
    found = {n: x.clone() for n, x in grads.items() if x is not None}
    return found | {"result": result.detach()}


def run(name: str) -> list[Exchange]:
    """Compare with one process; return what is gathered."""
    define_schemas()
    torch._dynamo.reset()
    torch.manual_seed(0)
    with default_dtype(torch.float64):
        made = functools.partial(model, *MODELS[name][:2])
        net, given = made(), MODELS[name][2]()
        alone = copy.deepcopy(net)
        compiled = compiled_on(2, net)
        with recording() as reports:
            got = step(compiled, net, given)
        wanted = step(alone, alone, given)
    assert got.keys() == wanted.keys()
    for key, x in wanted.items():
        # Some embed times and positions in float32, whatever the parameters are.
        assert_close(got[key], x, rtol=0, atol=2e-6 * float(x.abs().max()) + 1e-12)
    accounts = [account for report in reports for account in report.accounts]
    assert any(x.plan is not None for report in reports for x in report.calls)
    exchanges = [x for account in accounts for x in account.exchanges]
    return [x for x in exchanges if x.kind is Kind.ALL_GATHER]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", MODELS)
def test_streams_are_joined_without_gathers(pools, name):
    """The result is gathered, and where patches become tokens their gradient is."""
    for gathered in pools[2].run(run, name, timeout=230):
        others = [x for x in gathered if x.purpose is not Purpose.RESULT]
        assert len(others) <= 1, others
        for exchange in others:
            assert exchange.direction is GraphDirection.BACKWARD, exchange
            assert exchange.purpose in (Purpose.VALUE, Purpose.GRADIENT), exchange
