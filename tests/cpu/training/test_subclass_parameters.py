"""Parameters that are tensors of a class of their own, as quantised weights are."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import sequence_mesh
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


class Dispatched(Quantised):
    """Calls of aten, not of torch, read its plain numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is not aten.detach.default:
            args = pytree.tree_map_only(cls, cls.plain, args)
            return func(*args, **(kwargs or {}))
        return cls(func(args[0].data_), func(args[0].scale))


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


class WithoutParts(torch.Tensor):
    """Nothing tells what it is made of."""

    @staticmethod
    def __new__(cls, exact):
        return torch.Tensor._make_wrapper_subclass(cls, exact.shape, dtype=exact.dtype)

    def __init__(self, exact):
        self.exact = exact

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = pytree.tree_map_only(cls, lambda x: x.exact, args)
        result = func(*args, **(kwargs or {}))
        return cls(result) if func is aten.detach.default else result


CLASSES = {"dispatched": Dispatched, "matmul": Dispatched, "stubborn": Stubborn}
SHARED = ("linear", "tied", "region", "embedding", "buffer", "dispatched", "trained")
GATHERED = {"matmul", "stubborn"}


class Model(Base):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(WIDTH, WIDTH)
        self.double()
        weight = self.linear.weight.detach()
        quantised = CLASSES.get(kind, Quantised).of(weight)
        frozen = nn.Parameter(quantised, requires_grad=False)
        if kind == "embedding":
            table = Quantised.of(self.embedding.weight.detach())
            self.embedding.weight = nn.Parameter(table, requires_grad=False)
        elif kind == "buffer":
            self.register_buffer("table", quantised)
        elif kind == "trained":
            self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
            self.linear.weight = nn.Parameter(Rounded(weight))
        elif kind == "without parts":
            exact = WithoutParts(weight)
            self.linear.weight = nn.Parameter(exact, requires_grad=False)
        else:
            self.linear.weight = frozen

    def layer(self, x: Tensor) -> Tensor:
        if self.kind == "matmul":
            return x @ self.linear.weight
        if self.kind == "buffer":
            return F.linear(x, self.table)
        return (
            self.linear(self.linear(x).tanh())
            if self.kind == "tied"
            else self.linear(x)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.head(self.embedding(tokens))
        if self.kind == "region":
            return (
                attend(checkpoint(self.layer, x, use_reentrant=False)).square().mean()
            )
        return attend(self.layer(x)).square().mean()


def compiled(model, world, **options):
    torch._dynamo.reset()
    given = {"inner": "aot_eager", "mesh": sequence_mesh(world)} | options
    return torch.compile(model, backend="cp", options=given, fullgraph=True)


@pytest.mark.parametrize(("seq", "world"), [(16, 2), (17, 3)])
@on_ranks("world")
def test_steps_equal_one_process(seq, world):
    results = {}
    for kind in (*SHARED, *GATHERED):
        torch.manual_seed(0)
        model, tokens = Model(kind), torch.randint(0, 50, (2, seq))
        exact = step(model, model, tokens)
        with warnings() as texts:
            got = step(compiled(model, world), model, tokens)
        results[kind] = deviations(got, exact), texts
    for kind, (found, texts) in results.items():
        check(found)
        gathered = [x for x in texts if "on gathered tensors" in x]
        assert bool(gathered) == (kind in GATHERED), (kind, texts)
        if kind == "stubborn":
            assert "linear.weight is a Stubborn whose parts" in gathered[0]


@on_ranks(2)
def test_shares_of_a_gradient():
    """A gradient that the ranks have in shares, as under DDP, and that of one rank."""
    torch.manual_seed(0)
    model, tokens = Model("trained"), torch.randint(0, 50, (2, 16))
    exact = step(model, model, tokens)
    got = step(compiled(model, 2, grad_sync="none"), model, tokens)
    for name, x in got.items():
        if name != "loss":
            torch.distributed.all_reduce(x)
    check(deviations(got, exact))


def other_weights(kind):
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = Model(kind)
    if kind == "linear":
        with torch.no_grad():
            model.linear.weight.data_[0, 0] += rank
    call = compiled(model, 2)
    return message_of(lambda: call(torch.zeros(2, 16, dtype=torch.int64)))


@on_ranks(2)
def test_weights_that_differ_between_ranks():
    text = other_weights("linear")
    assert "RankMismatchError" in text and "parameter linear.weight" in text


@on_ranks(2)
def test_a_class_without_parts():
    """torch refuses it by itself, on every rank."""
    text = other_weights("without parts")
    assert text.startswith("Unsupported: ") and "WithoutParts" in text
