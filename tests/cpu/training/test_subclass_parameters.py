"""Parameters that are tensors of a class of their own, as quantised weights are."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import message_of
from tests.cpu.programs import WIDTH, Base, attend
from tests.support.bounds import check, deviations, step

aten = torch.ops.aten


class Quantised(torch.Tensor):
    """int8 times a scale per row. A layer reads plain numbers; nothing is a view."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    @classmethod
    def of(cls, weight):
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, others, size, stride):
        return cls(parts["data_"], parts["scale"])

    def plain(self):
        return self.data_.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (F.linear, F.embedding):
            x, weight, *rest = args
            return func(x, weight.plain(), *rest, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            (x,) = args
            return cls(func(x.data_), func(x.scale))
        raise NotImplementedError(f"{cls.__name__}: {func}")


class Stubborn(Quantised):
    """It takes no DTensors."""

    @classmethod
    def __tensor_unflatten__(cls, parts, others, size, stride):
        if type(parts["data_"]) is torch.distributed.tensor.DTensor:
            raise TypeError("plain parts only")
        return cls(parts["data_"], parts["scale"])


class Rounded(torch.Tensor):
    """A trained weight that a layer rounds; the gradient is that of the weight."""

    @staticmethod
    def __new__(cls, exact):
        return torch.Tensor._make_wrapper_subclass(
            cls, exact.shape, strides=exact.stride(), dtype=exact.dtype
        )

    def __init__(self, exact):
        self.exact = exact

    def __tensor_flatten__(self):
        return ["exact"], None

    @classmethod
    def __tensor_unflatten__(cls, parts, others, size, stride):
        return cls(parts["exact"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return StraightThrough.apply(*args[:2])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.detach.default:
            return cls(func(args[0].exact))
        raise NotImplementedError(f"Rounded: {func}")


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ (weight.exact * 8).round().t() / 8

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return grad @ (weight.exact * 8).round() / 8, of_weight


SHARED = ("linear", "region", "embedding", "buffer", "trained")


class Model(Base):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(WIDTH, WIDTH)
        self.double()
        weight = self.linear.weight.detach()
        quantised = (Stubborn if kind == "stubborn" else Quantised).of(weight)
        frozen = nn.Parameter(quantised, requires_grad=False)
        if kind == "embedding":
            table = Quantised.of(self.embedding.weight.detach())
            self.embedding.weight = nn.Parameter(table, requires_grad=False)
        elif kind == "buffer":
            self.register_buffer("table", quantised)
        elif kind == "trained":
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
            self.linear.weight = nn.Parameter(Rounded(weight))
        else:
            self.linear.weight = frozen

    def layer(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table) if self.kind == "buffer" else self.linear(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.head(self.embedding(tokens))
        if self.kind == "region":
            x = checkpoint(self.layer, x, use_reentrant=False)
        else:
            x = self.layer(x)
        return attend(x).square().mean()


@pytest.mark.parametrize(("seq", "world"), [(16, 2), (17, 3)])
@on_ranks("world")
def test_steps_equal_one_process(seq, world):
    for kind in (*SHARED, "stubborn"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, tokens = Model(kind), torch.randint(0, 50, (2, seq))
        exact = step(model, model, tokens)
        with warnings() as texts:
            got = step(compiled_on(world, model, fullgraph=True), model, tokens)
        check(deviations(got, exact))
        assert not [x for x in texts if "on gathered tensors" in x], (kind, texts)


@on_ranks(2)
def test_shares_of_a_gradient():
    """A gradient that the ranks have in shares, as under DDP, and that of one rank."""
    model, tokens = Model("trained"), torch.randint(0, 50, (2, 16))
    exact = step(model, model, tokens)
    got = step(compiled_on(2, model, grad_sync="none"), model, tokens)
    for name, x in got.items():
        if name != "loss":
            torch.distributed.all_reduce(x)
    check(deviations(got, exact))


@on_ranks(2)
def test_weights_that_differ_between_ranks():
    model = Model("linear")
    with torch.no_grad():
        model.linear.weight.data_[0, 0] += torch.distributed.get_rank()
    call = compiled_on(2, model)
    text = message_of(lambda: call(torch.zeros(2, 16, dtype=torch.int64)))
    assert "RankMismatchError" in text and "parameter linear.weight" in text
