"""Every cp:: operator gives the same for operands that lie in memory in any order.

The exact result is that of the same call in float64, where plain matrix products
compute attention, and the rough one that of contiguous operands.
"""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tests.cpu.on_ranks import on_ranks
from tests.cpu.operator_cases import Call, calls, registered
from tests.support.bounds import deviation
from tests.support.memory_orders import arrangements

OPERAND_SCALE = 1.0


def results(call: Call, leaves: list) -> list[Tensor]:
    operands = pytree.tree_unflatten(leaves, pytree.tree_structure(call.operands))
    found = call.run(*operands)
    return [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]


def faults(call: Call, exact: Call) -> list[str]:
    """What is wrong for some token_layout of one operand."""
    leaves, exact_leaves = map(pytree.tree_leaves, (call.operands, exact.operands))
    found = []
    promised = fake_places(call, leaves) if call.has_fake else None
    usual = results(call, leaves), results(exact, exact_leaves)
    for index, x in enumerate(leaves):
        if not isinstance(x, Tensor):
            continue
        for order, given in arrangements(x):
            place = f"{call.name}, operand {index}, {order}"
            rough, wanted = usual
            if "expanded" in order:  # it has other values
                rough = results(call, replaced(leaves, index, given.contiguous()))
                value = given.double() if given.is_floating_point() else given
                wanted = results(
                    exact, replaced(exact_leaves, index, value.contiguous())
                )
            got = results(call, replaced(leaves, index, given))
            for number, each in enumerate(zip(got, wanted, rough, strict=True)):
                name = f"{place}, result {number}"
                error = deviation(name, *each, floor=OPERAND_SCALE)
                found += [] if error.is_allowed else [str(error)]
            if promised is not None and (own := list(map(places, got))) != promised:
                found.append(f"{place}: results are {own}, fake ones {promised}")
    return found


def replaced(leaves: list, index: int, x: Tensor) -> list:
    return [*leaves[:index], x, *leaves[index + 1 :]]


def fake_places(call: Call, leaves: list) -> list[tuple]:
    """Where the fake implementation says that results lie, for any strides."""
    mode = FakeTensorMode()
    leaves = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in leaves]
    with mode:
        return list(map(places, results(call, leaves)))


def places(x: Tensor) -> tuple:
    strides = [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]
    return x.dtype, tuple(x.shape), strides


@pytest.mark.parametrize(
    ("dtype", "world", "once"),
    [
        (torch.float32, 2, True),
        (torch.bfloat16, 2, True),
        (torch.float32, 3, False),
    ],
)
@pytest.mark.timeout(360)
@on_ranks("world", timeout=300)
def test_every_operator(dtype, world, once):
    """What is wrong, and the operators that were called; each `once`, or all calls."""
    exact = list(calls(torch.float64))
    found, names, seen = [], set(), set()
    for call, wanted in zip(calls(dtype), exact, strict=True):
        if once and call.name in seen:
            continue
        found += faults(call, wanted)
        seen.add(call.name)
        names |= set(call.names)
    assert not found, "\n".join([f"{len(found)} faults", *found[:20]])
    assert names == registered(), "each operator needs a call in operator_cases.py"
