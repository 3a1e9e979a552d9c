"""Vision-language models train as in one process, with the settings of the how-to."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from cpcompile import logs
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import Comparison, warnings
from tests.cpu.attention_cases import sequence_mesh
from tests.models.families.vision_language import FAMILIES, Inputs
from tests.models.torchvision_schemas import define_schemas
from tests.support.bounds import Values, deviations, in_one_process


def of_dtype(inputs: Inputs, model: Any) -> Inputs:
    """The inputs in the dtype of the model's parameters."""
    dtype = next(model.parameters()).dtype
    return {
        name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()
    }


def trained(call: Any, model: Any, inputs: Inputs, features: tuple[str, ...]) -> Values:
    """The loss and all gradients, zero where there is none.

    features: the inputs of which the tower makes features before the call, as
        positions of several dimensions are.
    """
    model.zero_grad()
    given = of_dtype(inputs, model)
    made: dict[str, Any] = {}
    if features and hasattr(model.model, "get_rope_index"):
        of_positions = ("input_ids", "mm_token_type_ids", "image_grid_thw")
        positions = model.model.get_rope_index(**{x: given[x] for x in of_positions})
        made["position_ids"] = positions[0]
    if features:
        of_image = {name: given.pop(name) for name in features}
        image = model.get_image_features(**of_image, return_dict=True)
        made["mm_encoder_outputs"] = {"image": image}
    loss = call(**given, **made, use_cache=False).loss
    loss.backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return {"loss": loss.detach(), **grads}


def compared(name: str) -> tuple[Comparison, int, float]:
    """Deviations and warnings, graph breaks, and the work over one device's."""
    define_schemas()  # before models of transformers are imported
    torch._dynamo.reset()
    logs.warn_once.cache_clear()
    counters.clear()
    family = FAMILIES[name]
    torch.manual_seed(0)
    model, inputs = family.make()
    wanted = in_one_process(lambda alone: trained(alone, alone, inputs, ()), model)
    with torch.no_grad():
        model.forward(**of_dtype(inputs, model))  # sets hooks, which break the graph
    for path in family.in_eager:
        owner, _, function = path.rpartition(".")
        of = model.get_submodule(owner)
        setattr(of, function, torch.compiler.disable(getattr(of, function)))
    mesh = sequence_mesh(torch.distributed.get_world_size())
    options = {"mesh": mesh, "inner": "aot_eager"}
    no_check = mock.patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1")
    settings = torch._dynamo.config.patch(**family.settings)
    with no_check, settings, recording() as reports, warnings() as texts:
        compiled = torch.compile(model, backend="cp", options=options)
        found = trained(compiled, model, inputs, family.features)
    work = [account.work for report in reports for account in report.accounts]
    share = sum(x.flops for x in work) / sum(x.whole_flops for x in work)
    ratio = share * torch.distributed.get_world_size()
    comparison = Comparison(deviations(found, *wanted), texts)
    return comparison, len(counters["graph_break"]), ratio


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("name", "world"), [*((name, 2) for name in FAMILIES), ("qwen3_vl", 3)]
)
def test_a_training_step(pools, name, world):
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    for found, breaks, ratio in pools[world].run(compared, name, timeout=160):
        found.check()
        assert name != "qwen3_vl" or found.warnings == []
        assert breaks == family.breaks
        assert ratio <= family.work
