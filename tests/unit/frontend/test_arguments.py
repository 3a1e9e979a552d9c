"""Names in options["shard"] find their arguments, by the frame that Dynamo compiles."""

import dataclasses
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from cpcompile.compile import attempts
from cpcompile.frontend.arguments import Frame
from cpcompile.passes.graph.context import InputKind

MESH_AXES = {"cp": 2}


class _Found(Exception):
    """Ends a compilation once the inputs are known."""


def found(fn, mesh, shard, *args, **kwargs):
    """{graph input: dim} of the inputs that `shard` names, as the backend sees them."""
    contexts = []

    def keep(gm, _, ctx):
        contexts.append(ctx)
        raise _Found

    options = {"mesh": mesh, "shard": shard}
    compiled = torch.compile(fn, backend="cp", fullgraph=True, options=options)
    with (
        mock.patch.object(attempts, "run_passes", keep),
        pytest.raises(BackendCompilerFailed) as caught,
    ):
        compiled(*args, **kwargs)
    if not isinstance(caught.value.inner_exception, _Found):
        raise caught.value
    (ctx,) = contexts
    return {
        node.name.strip("_"): given.dim
        for node, given in ctx.inputs.items()
        if given.kind is InputKind.FULL
    }


def rejected(fn, mesh, shard, *args, **kwargs):
    """The message that reaches the user."""
    with pytest.raises(BackendCompilerFailed) as caught:
        found(fn, mesh, shard, *args, **kwargs)
    return str(caught.value).split("\n\n")[0]


def tensor():
    return torch.randn(2, 16)


class Inputs(NamedTuple):
    tokens: Tensor
    labels: Tensor


@dataclasses.dataclass
class Batch:
    tokens: Tensor
    labels: Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, tokens, labels=None):
        return self.linear(tokens)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def double(tokens, labels=None):
    return 2 * tokens


def double_of_keywords(**kwargs):
    return 2 * kwargs["tokens"]


def double_of_item(batch):
    return 2 * batch["tokens"]


def double_of_attribute(batch):
    return 2 * batch.tokens


TOKENS = {"tokens": 1}


class WithBuffer(nn.Module):
    """As the position_ids of many models: an argument has the name of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("positions", tensor())

    def forward(self, tokens, positions=None):
        positions = self.positions if positions is None else positions
        return tokens + positions + self.positions


def hooked():
    model = Model()
    model.register_forward_pre_hook(lambda module, args: None)
    return model


def add_items(a, b):
    return a["tokens"] + b["tokens"]


def add_item(tokens, batch):
    return tokens + batch["tokens"]


X = tensor()
ITEM, ARGUMENT = {"l_batch_tokens": 1}, {"l_tokens": 1}
BOTH = {"tokens": 1, "labels": 1}
WITH_POSITIONS = {"tokens": 1, "positions": 1}
# name: function, options["shard"], arguments, the inputs that it names
FOUND = {
    "positional": (double, TOKENS, [X], ARGUMENT),
    "keyword": (double, TOKENS, {"tokens": X}, ARGUMENT),
    "several": (
        *(lambda a, b, c: a + b + c, {"b": -1, "a": 0}),
        *([X, tensor(), tensor()], {"l_a": 0, "l_b": 1}),
    ),
    "collected keywords": (
        *(double_of_keywords, TOKENS, {"tokens": X}, {"l_kwargs_tokens": 1}),
    ),
    "collected arguments": (
        *(lambda *args: 2 * args[1], {"1": 0}, [X, tensor()], {"l_args_1": 0}),
    ),
    "dict": (double_of_item, TOKENS, [{"tokens": X}], ITEM),
    "dict by path": (double_of_item, {"batch.tokens": 1}, [{"tokens": X}], ITEM),
    "dataclass": (double_of_attribute, TOKENS, [Batch(X, X)], ITEM),
    "dataclass by path": (
        double_of_attribute,
        {"batch.tokens": 1},
        [Batch(X, X)],
        ITEM,
    ),
    "namedtuple": (double_of_attribute, TOKENS, [Inputs(X, X)], ITEM),
    "namedtuple by path": (
        *(double_of_attribute, {"batch.tokens": 1}, [Inputs(X, X)], ITEM),
    ),
    "list": (lambda xs: 2 * xs[0], {"xs.0": 1}, [[X]], {"l_xs_0": 1}),
    "module": (Model(), TOKENS, [X], ARGUMENT),
    "module by name": (Model(), TOKENS, {"tokens": X}, ARGUMENT),
    "module with hooks": (hooked(), TOKENS, [X], ARGUMENT),
    "wrapper": (Wrapper(Model()), TOKENS, [X], {"l_args_0": 1}),
    "wrapper by name": (
        *(Wrapper(Model()), TOKENS, {"tokens": X}, {"l_kwargs_tokens": 1}),
    ),
    "module of torch": (nn.Linear(16, 16), {"input": 1}, [X], {"l_args_0": 1}),
    "none": (double, BOTH, [X], ARGUMENT),
    "not used": (double, BOTH, [X, tensor()], ARGUMENT),
    "one of two by path": (
        *(add_items, {"b.tokens": 1}, [{"tokens": X}, {"tokens": tensor()}]),
        {"l_b_tokens": 1},
    ),
    "an argument before an item": (add_item, TOKENS, [X, {"tokens": X + 1}], ARGUMENT),
    "a buffer": (WithBuffer(), WITH_POSITIONS, [X], ARGUMENT),
    "instead of a buffer": (
        *(WithBuffer(), WITH_POSITIONS, [X, tensor()]),
        ARGUMENT | {"l_positions": 1},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_names_find_their_arguments(mesh, name):
    fn, shard, given, inputs = FOUND[name]
    args, kwargs = ([], given) if isinstance(given, dict) else (given, {})
    assert found(fn, mesh, shard, *args, **kwargs) == inputs


NO_NAME = "and no argument of {} is called so; the tensors among its arguments are:"
NO_TENSOR = "options['shard'] names 'n', and that is of type {}; needed a tensor"
NO_DIM = (
    "options['shard']['tokens']: got dim {} for a tensor of shape (2, 16); needed a "
    "dimension from -2 to 1"
)
REJECTED = {
    "no such name": (
        *(double, {"token": 1}, [X, X]),
        f"options['shard'] names 'token', {NO_NAME.format('double')} labels, tokens",
    ),
    "no such item": (
        *(double_of_attribute, {"ids": 1}, [Batch(X, X)]),
        f"options['shard'] names 'ids', {NO_NAME.format('double_of_attribute')} "
        "batch.labels, batch.tokens",
    ),
    "no tensor at all": (
        *(lambda n: torch.ones(n), {"ids": 1}, [3]),
        f"options['shard'] names 'ids', {NO_NAME.format('<lambda>')} none",
    ),
    "ambiguous": (
        *(add_items, TOKENS, [{"tokens": X}, {"tokens": tensor()}]),
        "options['shard'] names 'tokens', and several arguments are called so: "
        "a.tokens, b.tokens; needed one: use its dotted path",
    ),
    **{
        kind: (lambda x, n: 2 * x, {"n": 0}, [X, value], NO_TENSOR.format(kind))
        for value, kind in ((3, "int"), ("x", "str"), ([1], "list"))
    },
    "dim 2": (double, {"tokens": 2}, [X], NO_DIM.format(2)),
    "dim -3": (double, {"tokens": -3}, [X], NO_DIM.format(-3)),
}


@pytest.mark.parametrize("name", REJECTED)
def test_names_that_are_rejected(mesh, name):
    fn, shard, args, text = REJECTED[name]
    message = rejected(fn, mesh, shard, *args)
    assert message == f"backend='cp' raised:\nInputError: {text}"


class Labelled(nn.Module):
    def forward(self, tokens, labels=None):
        return tokens


def test_frames():
    # What Dynamo compiles may be nn.Module's own _call_impl(self, *args).
    model, x = Labelled(), torch.randn(2, 16)
    frame = Frame("_call_impl", {"self": model, "args": (x,), "kwargs": {"labels": x}})
    names = frame.argument_names()
    assert names["tokens"] is x
    assert names["labels"] is x
    assert frame.positional_name(1) == "labels"
    assert frame.positional_name(2) is None
    assert Frame("torch_dynamo_resume_in_forward_at_12", {}).is_part
    assert not Frame("forward", {}).is_part
    frame = Frame.current()
    assert (frame.name, frame.values) == ("<graph>", {})
