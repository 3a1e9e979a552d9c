"""Calls of padded tokens give what they give without the padding, or are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from cpcompile.frontend.padding.pad_graph import pad_graph
from cpcompile.frontend.symbolic_sizes import specialize_sizes
from cpcompile.passes.graph.context import Context
from cpcompile.passes.graph.nodes import fake_value
from cpcompile.passes.model.lengths.pad_tokens import pad_tokens

RANKS = 8
S = 13  # of which 16 are made
DIM = 1  # the dimension of tokens of every input


class Padded:
    """A function, compiled for S tokens and run on P."""

    def __init__(self, fn: Callable[..., Any], *inputs: Tensor) -> None:
        torch._dynamo.reset()
        self.fixes, self.junk = 0, math.nan
        self.text = ""
        self.run: Any = None
        for x in inputs:
            torch._dynamo.mark_dynamic(x, DIM)
        torch.compile(fn, backend=self._backend, fullgraph=True)(*inputs)

    def _backend(self, gm: fx.GraphModule, _: Any) -> Any:
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        module = fx.GraphModule(gm, graph)
        lengths = [fake_value(x).shape[DIM] for x in _tensors(module)]
        length = next(n for n in lengths if isinstance(n, torch.SymInt))
        specialize_sizes(module.graph, length)
        padding, around = pad_graph(module.graph, length, RANKS, "cpu")
        ctx = Context(mesh=None, axis=0, inputs={}, profile=None, padding=padding)
        self.fixes = pad_tokens(module.graph, ctx)
        module.graph.lint()
        module.recompile()
        self.text = module.code
        placeholders = module.graph.find_nodes(op="placeholder")
        names = [x.name for x in placeholders]
        self._given = [_giver(x) for x in placeholders if "grapharg" in x.meta]
        ctx.findings.outputs = [None] * len(ctx.findings.padded_results)

        def filled(*given: Any) -> Any:
            """Junk in place of the last token that was repeated."""
            real = int(given[names.index("cp_real_length")])
            return module(*(self._junk(x, real) for x in given))

        self.run = around(filled, ctx)
        return gm

    def __call__(self, *inputs: Tensor) -> Any:
        """What the padded program gives for the arguments of the function."""
        (result,) = self.results(*inputs)
        return result

    def results(self, *inputs: Tensor) -> tuple[Any, ...]:
        """All of them."""
        return self.run(*(x(inputs) for x in self._given))  # type: ignore[no-any-return]

    def _junk(self, x: Any, real: int) -> Any:
        """Numbers of the caller, or those that were there before in another order."""
        if not isinstance(x, Tensor) or x.dim() <= DIM or x.shape[DIM] % RANKS:
            return x
        mine = torch.arange(x.shape[DIM]) < real
        mine = mine.reshape(-1, *[1] * (x.dim() - DIM - 1))
        return torch.where(mine, x, self.junk if x.is_floating_point() else x.flip(DIM))


def _giver(node: fx.Node) -> Callable[[Any], Any]:
    """What an input of the graph is, by the arguments of the function."""
    argument = node.meta["grapharg"]
    name = re.fullmatch(r"L\['(\w+)'\]", argument.source.name)
    if name is not None:
        index = 0 if name[1] == "x" else 1
        return lambda inputs: inputs[index]
    if not isinstance(argument.example, Tensor):
        return lambda inputs: inputs[0].shape[DIM]
    return lambda inputs: argument.example


def _tensors(module: fx.GraphModule) -> list[fx.Node]:
    inputs = module.graph.find_nodes(op="placeholder")
    return [x for x in inputs if isinstance(fake_value(x), Tensor)]


WIDTH, CLASSES = 6, 11
generator = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


WEIGHT = normal(WIDTH, WIDTH)
TABLE = normal(40, WIDTH)  # shorter than many lengths
SHORT = normal(S + 1, WIDTH)  # than the padded one, too
LOGITS = normal(WIDTH, CLASSES)
TAPS = normal(WIDTH, WIDTH, 3)


def logits(x):
    return (x @ LOGITS).sin()


def shifted(labels, value=-100):
    """As in models of transformers."""
    return F.pad(labels, (0, 1), value=value)[..., 1:].contiguous()


def plus_one(labels):
    """The padding has the number no more that it was given."""
    labels.add_(1)
    return labels


def copied_by_parts(x, _):
    y = torch.empty_like(x)
    y[..., :2].copy_(x[..., 4:].sin())
    y[..., 2:].copy_(x[..., :1])
    return y * 2


def assigned_by_parts(x, _):
    """As DeepSeek's keys: one part of them for all heads."""
    y = x.new_empty(2, 3, x.shape[1], 4)
    y[:, :, :, :2] = x.unflatten(-1, (3, 2)).transpose(1, 2)
    y[:, :, :, 2:] = x[:, None, :, :2]
    return y * 2


def other_writes(x, _):
    y = x.sin()
    y.mul_(2)
    return x[:, -1] + y[:, 0]


def assigned_rows(x, _):
    y = x * 1
    y[:, :, 0] = 1.0
    y[0] = x[1]
    y[:, 2] = 0.5
    y[:, :2, 1] = TABLE[:2, 0]
    y[:, 3:5] = x[:, 4:6].sin()
    return y


def under_autocast(x, _):
    """In bfloat16, with weights of another dtype."""
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(F.linear(x.float(), WEIGHT.float()).relu(), WEIGHT.float())
    return y.double() * 2


RIGHT = {
    "autocast": under_autocast,
    "copied by parts": copied_by_parts,
    "assigned by parts": assigned_by_parts,
    "assigned rows": assigned_rows,
    "other writes": other_writes,
    "pointwise": lambda x, _: torch.sin(x) * 2 + x,
    "linear": lambda x, _: F.linear(x, WEIGHT).relu(),
    "norm": lambda x, _: F.layer_norm(x, (WIDTH,)),
    "rms norm": lambda x, _: F.rms_norm(x, (WIDTH,)),
    "softmax of channels": lambda x, _: x.softmax(-1),
    "flattened": lambda x, _: x.reshape(-1, WIDTH) @ WEIGHT,
    "flattened and back": lambda x, _: (x.flatten(0, 1) @ WEIGHT).view(x.shape),
    "heads": lambda x, _: x.unflatten(-1, (2, 3)).transpose(1, 2),
    "tokens first": lambda x, _: F.linear(x.transpose(0, 1), WEIGHT),
    "split": lambda x, _: x.chunk(2, -1)[1],
    "unbind": lambda x, _: x.unflatten(-1, (2, 3)).unbind(0)[1],
    "cat of channels": lambda x, _: torch.cat([x, x.cos()], -1),
    "deviation": lambda x, _: x / x.std(-1, keepdim=True) + x.var(-1, keepdim=True),
    "largest of channels": lambda x, _: x.max(-1).values + x.amin(-1),
    "product of channels": lambda x, _: x.prod(-1) * (x > 0).all(-1),
    "sort of channels": lambda x, _: x.sort(-1).values,
    "topk of flattened": lambda x, _: x.reshape(-1, WIDTH).topk(2)[0],
    "gathered of flattened": lambda x, t: x.flatten(0, 1).gather(
        1, x.flatten(0, 1).argsort(-1)[:, :3] + 0 * t.view(-1, 1)
    ),
    "embedded flattened": lambda x, t: x.view(-1, WIDTH) + F.embedding(
        t.flatten(), TABLE
    ),
    "topk": lambda x, _: x.topk(2)[0],
    "complex": lambda x, _: torch.view_as_complex(x.unflatten(-1, (3, 2))).abs(),
    "in place": lambda x, _: (x * 2).add_(1).mul_(x),
    "labels in place": lambda x, t: F.cross_entropy(
        logits(x).view(-1, CLASSES),
        plus_one(shifted(t.clamp(max=CLASSES - 2), 3)).view(-1),
        ignore_index=3,
    ),
    "positions": lambda x, _: x + torch.arange(x.shape[1])[:, None],
    "embedded positions": lambda x, _: x + F.embedding(torch.arange(x.shape[1]), TABLE),
    "short table": lambda x, _: x + F.embedding(torch.arange(x.shape[1]), SHORT),
    "rows of a table": lambda x, _: x + TABLE[torch.arange(x.shape[1])],
    "gathered": lambda x, t: x + TABLE[:, 0].expand(2, -1).gather(1, t)[..., None],
    "one hot": lambda x, t: x.sum(2) * F.one_hot(t, CLASSES)[..., 3],
    "first rows": lambda x, _: x + TABLE[: x.shape[1]],
    "ids": lambda x, t: x + F.embedding(t, TABLE),
    "zeros": lambda x, _: x + torch.zeros(2, x.shape[1], 1),
    "zeros like": lambda x, _: torch.zeros_like(x) + 1,
    "cumsum": lambda x, _: x.cumsum(1),
    "first": lambda x, _: x[:, 0] * 2,
    "last": lambda x, _: x[:, -1] * 2,
    "last but one": lambda x, _: x.select(1, -2),
    "two at the end": lambda x, _: x.unsqueeze(0)[:, :, -2:] + 1,
    "two of one at the end": lambda x, _: x[:, 1:][:, -2:],
    "two at the end, cut": lambda x, _: x[:, -2:, 1:] * x[0, -1, 2:4, None].sum(),
    "picked channels": lambda x, _: x.unflatten(-1, (3, 2))[..., [-2], :],
    "all from the end": lambda x, _: x[:, -x.shape[1] :] * x[:, -1 - x.shape[1] :],
    "more than there are": lambda x, _: x[:, -100:] * 2,
    "without the first": lambda x, _: x[:, 1:] * x[:, :-1],
    "some from the start": lambda x, _: x[:, 2:5],
    "padded channels": lambda x, _: torch.constant_pad_nd(x, (1, 2), 0.5),
    "padded in front": lambda x, _: F.pad(x, (0, 0, 1, 0))[:, :-1] + x,
    "after a token": lambda x, _: torch.cat([TABLE[:1].expand(2, 1, -1), x], 1),
    "sum": lambda x, _: x.exp().sum(1),
    "sum of all": lambda x, _: x.cos().sum(),
    "mean": lambda x, _: x.exp().mean(1, keepdim=True),
    "mean of all": lambda x, _: x.exp().mean(),
    "flattened mean": lambda x, _: x.exp().view(-1, WIDTH).mean(0),
    "low mean": lambda x, _: x.bfloat16().mean((0, 1)),
    "sum over the length": lambda x, _: x.exp().sum(1) / x.shape[1],
    "a token over the length": lambda x, _: x[:, 0] * x.shape[1] + x.shape[1],
    "the last two": lambda x, _: (
        x * (torch.arange(x.shape[1])[:, None] >= x.shape[1] - 2)
    ),
    "divided by the length": lambda x, _: x / x.shape[1],
    "length over tokens": lambda x, _: x.shape[1] / x.exp(),
    "maximum": lambda x, _: x.amax(1),
    "maximum and where": lambda x, _: x.max(1).values * x.max(1).indices,
    "maximum of all": lambda x, _: x.max(),
    "maximum of flattened": lambda x, _: x.view(-1, WIDTH).amax(0),
    "maximum of two": lambda x, _: torch.max(x, x.sin()),
    "minimum": lambda x, _: x.amin(1) + x.min(1).values,
    "minimum of ids": lambda x, t: t.amin(1) + t.amax(1),
    "where the maximum is": lambda x, _: x.argmax(1) - x.argmin(1),
    "any": lambda x, _: (x > 2).any(1) | (x > 0).all(1),
    "any of numbers": lambda x, t: (t * 0).any(1) | (x.exp() * 0).any(2).any(1),
    "all of numbers": lambda x, t: (t + 1).all(1) & x.exp().all(2).all(1),
    "log of a sum": lambda x, _: x.logsumexp(1),
    "softmax of tokens": lambda x, _: x.softmax(1),
    "pooled": lambda x, _: (F.softmax(x @ WEIGHT, dim=1) * x).sum(1),
    "log softmax of tokens": lambda x, _: x.log_softmax(1)[:, 0],
    "products of tokens": lambda x, _: x.transpose(1, 2) @ x.sin(),
    "products of flattened": lambda x, _: x.view(-1, WIDTH).mT @ (2 * x).flatten(0, 1),
    "product over tokens": lambda x, _: x.sin().prod(1),
    "products of softmaxes": lambda x, _: torch.bmm(x.mT.softmax(-1), x.softmax(-1)),
    "sum of ids": lambda x, t: t.sum(1),
    "cross entropy": lambda x, t: F.cross_entropy(logits(x).flatten(0, 1), t.flatten()),
    "log likelihood": lambda x, t: F.nll_loss(
        logits(x).log_softmax(-1).flatten(0, 1), t.flatten(), weight=TABLE[:CLASSES, 0]
    ),
    "classes second": lambda x, t: F.cross_entropy(logits(x).transpose(1, 2), t),
    "sum of losses": lambda x, t: F.cross_entropy(
        logits(x).view(-1, CLASSES), t.view(-1), reduction="sum", label_smoothing=0.1
    ),
    "loss per token": lambda x, t: F.cross_entropy(
        logits(x).view(-1, CLASSES), t.view(-1), reduction="none"
    ),
    "shifted labels": lambda x, t: F.cross_entropy(
        logits(x).view(-1, CLASSES), shifted(t).view(-1)
    ),
    "shifted logits": lambda x, t: F.cross_entropy(
        logits(x)[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1)
    ),
    "squared error": lambda x, _: F.mse_loss(x.exp(), x.sin()),
    "sum of errors": lambda x, _: F.l1_loss(x.exp(), x.sin(), reduction="sum"),
    "binary": lambda x, t: F.binary_cross_entropy_with_logits(
        x[..., 0], (t > 5).double()
    ),
    "weighted errors": lambda x, _: F.mse_loss(x.exp(), x.sin(), weight=x.cos() + 2),
    "expanded weights": lambda x, _: F.l1_loss(
        x.exp(), x.sin(), weight=TABLE[0].expand(2, x.shape[1], WIDTH)
    ),
    "errors as they were summed": lambda x, _: F.mse_loss(
        x.exp(), x.sin(), size_average=False
    ),
    "divergence per row": lambda x, _: F.kl_div(
        x.log_softmax(-1), x.softmax(-1), reduction="batchmean"
    ),
    "divergence per token": lambda x, _: F.kl_div(
        x.transpose(0, 1), x.transpose(0, 1), None, None, "batchmean", True
    ),
    "divergence per flattened token": lambda x, _: F.kl_div(
        x.view(-1, WIDTH), x.exp().flatten(0, 1), reduction="batchmean"
    ),
    "labels as they were summed": lambda x, t: F.cross_entropy(
        logits(x).flatten(0, 1), t.flatten(), reduce=False
    ),
    "convolution": lambda x, _: F.conv1d(x.mT, TAPS, padding=1),
    "dilated": lambda x, _: F.conv1d(x.mT, TAPS, dilation=2, padding="same"),
    "convolution without zeros": lambda x, _: F.conv1d(x.mT, TAPS),
    "causal convolution": lambda x, _: F.conv1d(
        x.mT, TAPS[:, :1], TABLE[0], padding=2, groups=WIDTH
    )[..., : x.shape[1]],
    "padded convolution": lambda x, _: F.conv1d(F.pad(x.exp().mT, (2, 0)), TAPS),
    "padded on both sides": lambda x, _: F.conv1d(F.pad(x.mT, (2, 1)), TAPS) * 2,
    "padded with ones": lambda x, _: F.conv1d(F.pad(x.mT, (2, 1), value=1.0), TAPS),
    "convolution of an image": lambda x, _: F.conv2d(
        x[:, None], TAPS[:1, :1, None].expand(1, 1, 2, 3), padding=1
    ),
    "weighted": lambda x, t: (x * (t > 3)[..., None]).sum() / (t > 3).sum(),
}  # fmt: skip


WITHOUT_GRADIENT = {
    "sum of ids",
    "zeros like",
    "low mean",
    "minimum of ids",
    "where the maximum is",
    "any",
    "any of numbers",
    "all of numbers",
}


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator.manual_seed(tokens)
    x = normal(2, tokens, WIDTH)
    return x, torch.randint(0, CLASSES, (2, tokens), generator=generator)


@pytest.mark.parametrize("name", RIGHT)
def test_what_the_padding_has_is_not_read(name):
    """Not even NaN; for another length, and one that the ranks divide, too."""
    fn = RIGHT[name]
    padded = Padded(fn, *inputs(S))
    for tokens in (S, 14, 3 * RANKS, 2 * RANKS + 1):
        if "short" in name and tokens > S:
            continue
        given = inputs(tokens)
        found, expected = padded(*given), fn(*given)
        assert found.shape == expected.shape and found.dtype == expected.dtype
        assert found.is_contiguous() or not expected.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in RIGHT if n not in WITHOUT_GRADIENT])
def test_the_gradient_is_that_of_the_tokens(name):
    fn = RIGHT[name]
    padded = Padded(fn, *inputs(S))
    padded.junk = 0.5
    x, labels = inputs(S)
    gradients = []
    for call in (padded, fn):
        leaf = x.clone().requires_grad_()
        result = call(leaf, labels)
        result.sin().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_results_that_are_numbers_of_tokens():
    padded = Padded(lambda x, _: (x * 2, x.shape[1] - 1, x.shape[1]), *inputs(S))
    for tokens in (S, 14, 2 * RANKS):
        numbers = [n for n in padded.results(*inputs(tokens)) if isinstance(n, int)]
        assert numbers == [tokens - 1, tokens]


def written_at_the_end(x, _):
    y = x * 1
    y[:, -2:].mul_(2)
    return y


def shown_at_the_end(x, _):
    y = x * 1
    last = y.select(1, -1)
    y.add_(1)
    return last


def assigned(index, value):
    def fn(x, _):
        y = x * 1
        y[index] = value(x)
        return y

    return fn


EACH = slice(None)
WRONG = {
    "written at the end": written_at_the_end,
    "written after the view": shown_at_the_end,
    "assigned last": assigned((EACH, -1), lambda x: 0.5),
    "assigned from the second on": assigned((EACH, slice(1, None)), lambda x: 0.5),
    "assigned the token before": assigned((EACH, slice(1, None)), lambda x: x[:, :-1]),
    "assigned to an input": lambda x, _: x.__setitem__((EACH, 0), 1.0),
    "assigned to a list": assigned((EACH, [0, 2]), lambda x: 0.5),
    "a power of the length": lambda x, _: x ** x.shape[1],
    "alpha": lambda x, _: torch.add(x, x, alpha=x.shape[1]),
    "a small number": lambda x, t: t.sum().to(torch.int8) * x.shape[1],
    "twice the length": lambda x, _: (x * 2, 2 * x.shape[1]),
    "flip": lambda x, _: x.flip(1),
    "roll": lambda x, _: x.roll(1, 1),
    "sort": lambda x, _: x.sort(1)[0],
    "where in all": lambda x, _: x.argmax(),
    "where in all rows": lambda x, _: x.view(-1, WIDTH).max(0).indices,
    "products in another order": lambda x, _: (
        x.reshape(-1, WIDTH).mT @ x.transpose(0, 1).reshape(-1, WIDTH)
    ),
    "all but the first, from the end": lambda x, _: x[:, 1 - x.shape[1] :],
    "of the second sequence": lambda x, _: x.reshape(-1, WIDTH)[S + 2],
    "every second": lambda x, _: x[:, ::2],
    "from a token on": lambda x, _: x[:, x.shape[1] // 2 :],
    "positions from the end": lambda x, _: x + torch.arange(x.shape[1], 0, -1)[:, None],
    "shifted to the left": lambda x, _: F.pad(x, (0, 0, -1, 1)),
    "shifted by aten": lambda x, _: torch.constant_pad_nd(x, (0, 0, -1, 1)),
    "repeated": lambda x, _: x.repeat(1, 2, 1),
    "pairs": lambda x, _: x @ x.transpose(1, 2),
    "convolution with a stride": lambda x, _: F.conv1d(x.mT, TAPS, stride=2),
    "transposed convolution": lambda x, _: F.conv_transpose1d(x.mT, TAPS),
    "tokens as channels": lambda x, _: F.conv1d(x, x[0, :, :3].expand(1, -1, -1)),
    "convolution at the end": lambda x, _: F.conv1d(F.pad(x.mT, (-1, 0)), TAPS),
    "picked": lambda x, t: x.gather(1, t[..., None].clamp(max=2)),
    "written": lambda x, _: torch.index_fill(x, 1, torch.tensor([-1]), 0.0),
    "put after": lambda x, _: torch.cat([x, TABLE[:1].expand(2, 1, -1)], 1),
    "listed": lambda x, _: x[:, [0, 3]],
    "listed with the last": lambda x, _: x[[0], -1, [1]],
    "listed first": lambda x, _: x.transpose(0, 1)[[0, 3]],
    "an input": lambda x, _: x.add_(1),
    "a view of an input": lambda x, _: x.view(-1).mul_(2).sum(),
    "two sequences": lambda x, _: torch.cat([x, x], 1),
    "moved to the end": lambda x, _: F.pad(x, (0, 0, 0, 1), mode="circular"),
    "batch mean of a mean": lambda x, _: F.kl_div(x, x, True, reduction="batchmean"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name):
    with pytest.raises(BackendCompilerFailed, match="cannot be padded"):
        Padded(WRONG[name], *inputs(S))
