"""Attention whose weights are returned, as transformers' `output_attentions`."""

import logging

import pytest
import torch
import transformers

from cpcompile.logs import warn_once
from cpcompile.reporting.report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.model_cases import VOCABULARY
from tests.support.bounds import check, deviations

SEQ = 24


def build(dtype):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    ids = torch.randint(0, VOCABULARY, (2, SEQ))
    return model, {"input_ids": ids, "labels": ids}


def values(call, model, inputs):
    result = call(**inputs, output_attentions=True, use_cache=False)
    (result.loss + sum(x.square().sum() for x in result.attentions)).backward()
    found = {"loss": result.loss.detach(), "logits": result.logits.detach()}
    weights = {f"weights {i}": x.detach() for i, x in enumerate(result.attentions)}
    named = model.named_parameters()
    return found | weights | {f"grad of {n}": p.grad for n, p in named}


def run(world):
    torch._dynamo.reset()
    warn_once.cache_clear()
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("cpcompile").addHandler(handler)
    model, inputs = build(torch.float32)
    shard = dict.fromkeys(inputs, 1)
    options = {"mesh": sequence_mesh(world), "shard": shard, "inner": "aot_eager"}
    with recording() as reports:
        compiled = torch.compile(model, backend="cp", options=options)
        found = values(compiled, model, inputs)
    logging.getLogger("cpcompile").removeHandler(handler)
    return found, [x for report in reports for x in report.left], records


@pytest.mark.core("2")
@pytest.mark.parametrize("world", [2, 3])
def test_they_are_exact_and_said_to_be_left(pools, world):
    exact, rough = (
        values(model, model, inputs)
        for model, inputs in map(build, (torch.float64, torch.float32))
    )
    exact = {name: x.double() for name, x in exact.items()}
    for found, left, records in pools[world].run(run, world, timeout=240):
        check(deviations(found, exact, rough))
        assert len(left) == 2
        assert any("attention is written by hand" in x for x in records), records
