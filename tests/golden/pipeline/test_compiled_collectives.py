"""What the compiler gets of a training step: local operators and few collectives."""

import operator
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

import cpcompile as cp
from tests.golden.ring_graphs import kept_graphs
from tests.models.families.small_gpt import SmallGPT
from tests.support.settings import split

S, CONTEXT, WIDTH, VOCABULARY, LAYERS, HEADS = 4096, 5000, 16, 32, 2, 2
FORMS = ["plain inputs", "sharded inputs"]


@dataclass(frozen=True)
class Compiled:
    """The graphs of a training step, and the model that has its gradients."""

    model: SmallGPT
    forward: fx.Graph
    backward: fx.Graph

    @property
    def graphs(self):
        return self.forward, self.backward


def compile_step(mesh, tokens=64, form=FORMS[0], model=None, batch=2, **options):
    """Forward and backward of SmallGPT; what a fake group computes has no meaning."""
    model = SmallGPT(VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT, **(model or {}))
    ids = torch.randint(VOCABULARY, (batch, tokens))
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


def tensors(graph):
    """(node, tensor) for every tensor that a call of the graph makes."""
    for node in graph.nodes:
        if node.op == "call_function":
            for value in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(value, Tensor):
                    yield node, value


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


def test_a_batch_of_one_moves_nothing_more(mesh):
    step = compile_step(mesh, batch=1)
    assert targets(step.forward) == {"ring_attention": LAYERS, "all_reduce": 1}


def test_gathered_logits_cost_one_collective(mesh):
    step = compile_step(mesh, gather_outputs_megabytes=1)
    assert targets(step.forward)["all_gather_into_tensor"] == 1
    assert targets(step.forward)["all_reduce"] == 1


def test_gradients_that_are_left_local_cost_none(mesh):
    step = compile_step(mesh, grad_sync="none")
    assert targets(step.backward) == {"ring_attention_backward": LAYERS}


def test_checkpointed_layers_run_their_operator_again(mesh):
    step = compile_step(mesh, model={"checkpointed": (0, 1)})
    assert targets(step.forward)["ring_attention"] == LAYERS
    assert targets(step.backward)["ring_attention"] == LAYERS
    assert targets(step.backward)["ring_attention_backward"] == LAYERS


@pytest.mark.parametrize("form", FORMS)
def test_no_activation_has_the_whole_sequence(mesh, form):
    """Nor has anything else that is large, which every rank would have to hold."""
    step = compile_step(mesh, S, form, batch=1)
    parameters = {tuple(p.shape) for p in step.model.parameters()}
    parameters |= {tuple(reversed(shape)) for shape in parameters}
    for graph in step.graphs:
        floats = {
            node.name: tuple(value.shape)
            for node, value in tensors(graph)
            if value.is_floating_point() and tuple(value.shape) not in parameters
        }
        assert floats
        whole = {n: shape for n, shape in floats.items() if max(shape, default=0) >= S}
        sizes = {torch.Size(shape).numel() for shape in whole.values()}
        assert sizes <= {S, S * WIDTH}  # the table of positions, of less than 1 MiB
        parts = (shape for n, shape in floats.items() if n not in whole)
        largest = max(torch.Size(shape).numel() for shape in parts)
        assert largest == S // 8 * 4 * WIDTH  # the hidden layer of the MLP


@pytest.mark.parametrize(("tied", "gradients"), [(True, 1), (False, 2)])
def test_tied_weights_have_one_gradient(mesh, tied, gradients):
    step = compile_step(mesh, model={"tied": tied})
    shape = [VOCABULARY, WIDTH]
    reduced = [
        node
        for node, value in tensors(step.backward)
        if "all_reduce" in str(node.target) and list(value.shape) == shape
    ]
    assert len(reduced) == gradients
    assert list(step.model.tokens.weight.grad.shape) == shape
