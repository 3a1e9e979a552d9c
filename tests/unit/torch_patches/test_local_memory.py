"""Kernels that read memory as if operands were contiguous, and what they are given."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cpcompile.torch_patches import local_memory
from tests.golden.capture import fake_mesh
from tests.support.bounds import ROUNDINGS
from tests.support.memory_orders import in_memory_order

aten = torch.ops.aten
SAMPLES, CALLS = 12, 12


class ReadsMemory(TorchDispatchMode):
    """Runs each call again with operands in another memory order, one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, int] = {}
        self.found: set[Any] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not _is_function_of_values(func) or self.calls.get(func, 0) >= CALLS:
            return out
        self.calls[func] = self.calls.get(func, 0) + 1
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        for i, x in enumerate(leaves):
            if not (isinstance(x, Tensor) and x.layout == torch.strided and x.ndim > 1):
                continue
            turned = in_memory_order(x, range(x.ndim)[::-1])
            again = [turned if j == i else leaf for j, leaf in enumerate(leaves)]
            if not _gives(out, func, *pytree.tree_unflatten(again, spec)) and _gives(
                out, func, args, kwargs
            ):
                self.found.add(func)
        return out


def _is_function_of_values(func) -> bool:
    schema = func._schema
    return (
        func.namespace == "aten"
        and not schema.is_mutable
        and not any(r.alias_info for r in schema.returns)
        and torch.Tag.nondeterministic_seeded not in func.tags
        and "empty" not in schema.name  # gives what lay there
        and "as_strided" not in schema.name  # asks for memory
    )


def _gives(out, func, args, kwargs) -> bool:
    try:
        again = func(*args, **(kwargs or {}))
    except (RuntimeError, ValueError):
        return False
    floor = max(map(_size, pytree.tree_leaves((args, kwargs))), default=0.0)
    return all(
        x.layout == torch.strided and x.shape == y.shape and _is_close(x, y, floor)
        for x, y in zip(*map(pytree.tree_leaves, (out, again)), strict=True)
        if isinstance(x, Tensor)
    )


def _is_close(x: Tensor, y: Tensor, floor: float) -> bool:
    """Whether they differ by roundings, of sums in another order; see bounds.py."""
    if not (x.is_floating_point() or x.is_complex()):
        return torch.equal(x, y)
    allowed = ROUNDINGS * torch.finfo(x.dtype).eps * max(_size(x), floor)
    return torch.allclose(x, y, rtol=0, atol=allowed, equal_nan=True)


def _size(x: Any) -> float:
    """The largest finite absolute value of a float tensor."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return 0.0
    values = x.detach().abs()
    values = values[values.isfinite()]
    return values.max().item() if values.numel() else 0.0


@pytest.fixture
def filled_memory():
    """What kernels leave as it was, as that of ctc_loss does, is NaN each time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore")  # of torch's own samples
def test_every_kernel_that_reads_memory_is_known(filled_memory):
    torch.manual_seed(0)
    reads = ReadsMemory()
    for op in op_db:
        if torch.float64 not in op.dtypes:
            continue
        samples = op.sample_inputs(
            "cpu", torch.float64, requires_grad=op.supports_autograd
        )
        for _, sample in zip(range(SAMPLES), samples, strict=False):
            given = (sample.input, sample.args, sample.kwargs)
            # some samples of torch fail by themselves, on machines without LAPACK
            with contextlib.suppress(Exception), reads:
                out = op.op(sample.input, *sample.args, **sample.kwargs)
                torch.autograd.grad(
                    sum(y.abs().sum() for y in _differentiable(out)),
                    _differentiable(given),
                    allow_unused=True,
                )
    assert len(reads.calls) > 400  # operators of aten
    assert aten.native_group_norm_backward.default in reads.found
    known = {
        *local_memory.CONTIGUOUS_ONLY,
        *local_memory.MISTRACED,
        *local_memory.VIEWS,
    }
    assert reads.found <= known, reads.found - known


def _differentiable(values) -> list[Tensor]:
    return [
        x
        for x in pytree.tree_leaves(values)
        if isinstance(x, Tensor) and x.requires_grad
    ]


@pytest.fixture
def norms():
    """The backward of a norm over groups, its operands, and what is given besides."""
    sizes = (2, 4, 6, 2)
    x, grad = torch.randn(2, 2, 4, 6).unbind()
    _, mean, rstd = aten.native_group_norm(x, None, None, *sizes, 1e-5)
    rest = (None, *sizes, [True, False, False])
    return aten.native_group_norm_backward.default, (grad, x, mean, rstd), rest


def test_a_part_is_copied_into_the_order_that_the_whole_has(norms):
    call, operands, rest = norms
    want, *_ = call(*operands, *rest)
    turned = in_memory_order(operands[0], (0, 2, 1))  # called contiguous below
    with fake_mesh(2) as mesh:
        stated = [
            DTensor.from_local(
                part, mesh, [Replicate()], shape=y.shape, stride=y.stride()
            )
            for y, part in zip(operands, (turned, *operands[1:]), strict=True)
        ]
        with local_memory.copied_if_need_be():
            got, *_ = call(*stated, *rest)
    assert torch.equal(got.to_local(), want)


def test_a_result_lies_as_the_kernel_makes_it(norms):
    """Meta functions of torch 2.13 and 2.14 order it as the gradient lies."""
    call, (grad, *others), rest = norms
    turned = in_memory_order(grad, (0, 2, 1))
    made = call(turned.contiguous(), *others, *rest)[0].stride()
    with (
        fake_mesh(2) as mesh,
        FakeTensorMode() as mode,
        local_memory.copied_if_need_be(),
    ):
        given = [
            DTensor.from_local(
                mode.from_tensor(y), mesh, [Replicate()], run_check=False
            )
            for y in (turned, *others)
        ]
        assert given[0].stride() == turned.stride() != made
        traced = call(*given, *rest)[0]
    assert traced.stride() == traced.to_local().stride() == made
