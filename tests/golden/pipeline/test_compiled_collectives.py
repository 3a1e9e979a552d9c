"""What the compiler gets of a training step: local operators and few collectives."""

import operator
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.fx as fx

import cpcompile as cp
from tests.golden.ring_graphs import kept_graphs
from tests.models.families.small_gpt import SmallGPT
from tests.support.settings import split

CONTEXT, WIDTH, VOCABULARY, LAYERS, HEADS = 64, 16, 32, 2, 2
FORMS = ["plain inputs", "sharded inputs"]


@dataclass(frozen=True)
class Compiled:
    """The graphs of a training step, and the model that has its gradients."""

    model: SmallGPT
    forward: fx.Graph
    backward: fx.Graph


def compile_step(mesh, form=FORMS[0], model=None, batch=2, **options):
    """Forward and backward of SmallGPT; what a fake group computes has no meaning."""
    model = SmallGPT(VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT, **(model or {}))
    ids = torch.randint(VOCABULARY, (batch, CONTEXT))
    inputs = [ids, ids.roll(1)]
    options = {"strategy": "ring", "inner": "aot_eager"} | options
    options, settings = split({"gather_outputs_megabytes": 0} | options)
    if form == "plain inputs":
        options |= {"mesh": mesh, "shard": {"tokens": 1, "labels": 1}}
    else:
        inputs = [cp.shard(x, mesh, 1) for x in inputs]
    with kept_graphs() as (graphs, _), settings:
        step = torch.compile(model, backend="cp", fullgraph=True, options=options)
        _, loss = step(*inputs)
        loss.backward()
    return Compiled(model, *graphs)


def targets(graph):
    """Number of calls of every cp:: operator and collective, by short name.

    All calls are operators: nothing is left of DTensors.
    """
    calls = [x.target for x in graph.nodes if x.op == "call_function"]
    others = [call for call in calls if call is not operator.getitem]
    assert all(isinstance(call, torch._ops.OpOverload) for call in others)
    names = list(map(str, others))
    prefixes = ("cp.", "_c10d_functional.")
    return Counter(
        name.split(".")[1]
        for name in names
        if name.startswith(prefixes) and "wait_tensor" not in name
    )


EXCHANGES = {"ulysses_scatter": LAYERS, "ulysses_gather": LAYERS}
OPERATORS = {
    "ring": ({"ring_attention": LAYERS}, {"ring_attention_backward": LAYERS}),
    "all_gather": (
        {"all_gather_attention": LAYERS},
        {"all_gather_attention_backward": LAYERS},
    ),
    "ulysses": (EXCHANGES, EXCHANGES),
}


@pytest.mark.parametrize("strategy", OPERATORS)
@pytest.mark.parametrize("form", FORMS)
def test_attention_and_one_reduction_per_parameter(mesh, form, strategy):
    """The loss is a sum over the ranks; labels that are sharded are gathered."""
    step = compile_step(mesh, form=form, strategy=strategy)
    gathers = {"all_gather_into_tensor": 1} if form == "sharded inputs" else {}
    forward, backward = OPERATORS[strategy]
    parameters = len(list(step.model.parameters()))
    assert targets(step.forward) == gathers | forward | {"all_reduce": 1}
    assert targets(step.backward) == backward | {"all_reduce": parameters}


RING, BACKWARD = OPERATORS["ring"]
# Options, and what the forward and the backward have besides or instead.
OTHERS = {
    "a batch of one": ({"batch": 1}, {}, {}),
    "gathered logits": (
        {"gather_outputs_megabytes": 1},
        {"all_gather_into_tensor": 1},
        {},
    ),
    "local gradients": ({"grad_sync": "none"}, {}, {"all_reduce": 0}),
    "checkpointed layers": ({"model": {"checkpointed": (0, 1)}}, {}, RING),
    "tied weights": ({"model": {"tied": True}}, {}, {}),  # have one gradient
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_an_option_changes(mesh, name):
    options, forward, backward = OTHERS[name]
    step = compile_step(mesh, **options)
    parameters = len(list(step.model.parameters()))
    forward = RING | {"all_reduce": 1} | forward
    backward = BACKWARD | {"all_reduce": parameters} | backward
    assert targets(step.forward) == Counter(forward)
    assert targets(step.backward) == Counter(backward)
