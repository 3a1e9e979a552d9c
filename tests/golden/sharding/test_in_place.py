"""In-place calls become functional ones; each rank writes in its part."""

import operator
import re

import pytest
import torch
import torch.nn.functional as F

from tests.golden.capture import localised, warnings

SHARD = {"x": 1}


def add(x):
    return x.relu().add_(1) * 2


def multiply(x):
    return operator.imul(x.relu(), 2)


def activate(x):
    return F.relu(x * 2, inplace=True) + 1


def assign(x):
    y = x.relu()
    y[:, 0] = 0
    return y * 2


def assign_to_a_part_of_tokens_and_channels(x):
    y = x.relu()
    y[:, 0, :4] = 0
    return y * 2


def write_to_an_alias(x):
    """What is written goes to a copy, from which the others are made anew."""
    y = x.relu()
    first = y[:, :4]
    first.add_(1)
    return y * 2


def write_what_no_other_reads_later(x):
    y = x.relu()
    first = y[:, :4].sum()
    return y.add_(1) * first


def fill_a_plain_tensor(x):
    buffer = torch.zeros(2, 16, 8)
    buffer[:] = x.relu()
    return buffer * 2


def write_parts(x):
    """As DeepSeek's keys are made."""
    y = x.new_empty(2, 16, 8)
    y[..., :5] = x[..., 3:]
    y[..., 5:].copy_(x[..., :3])
    return F.scaled_dot_product_attention(y, y, y)


def write_a_result(x):
    y = x.relu()
    memory = torch.zeros_like(y)
    with torch.no_grad():
        result = torch.add(y, 1, out=memory)
    return result * 2 + memory


WRITES = (add, multiply, activate, assign, assign_to_a_part_of_tokens_and_channels)
WRITES += (write_to_an_alias, write_what_no_other_reads_later, fill_a_plain_tensor)
WRITES += (write_parts, write_a_result)


@pytest.mark.parametrize("fn", WRITES)
def test_a_write_gathers_nothing(mesh, caplog, fn):
    given = {"mesh": mesh, "shard": SHARD, "strategy": "ring"}
    found = localised(lambda x: fn(x).cos().sum(), torch.randn(2, 16, 8), **given)
    assert "all_gather" not in found.text
    assert not warnings(caplog)


@torch.library.custom_op("cp_in_place::fill", mutates_args={"out"})
def fill(x: torch.Tensor, out: torch.Tensor) -> None:
    """Writes into an argument that is not the first one."""
    out.copy_(x * 3)


@torch.library.custom_op("cp_in_place::count", mutates_args={"x"})
def count(x: torch.Tensor) -> torch.Tensor:
    """Returns something else than what it writes to."""
    x.add_(1)
    return x.sum()


@count.register_fake
def _(x):
    return x.new_empty(())


def filled(x):
    y = F.scaled_dot_product_attention(x, x, x)
    out = torch.zeros_like(y)
    fill(y, out)
    return out * 2


def counted(x):
    y = F.scaled_dot_product_attention(x, x, x)
    return count(y) + y.sum()


@pytest.mark.parametrize("fn", [filled, counted])
def test_operators_without_a_rule_write_on_gathered_tensors(mesh, caplog, fn):
    x = torch.randn(2, 16, 8)
    text = localised(fn, x, mesh=mesh, shard=SHARD, strategy="ring").text
    assert "all_gather" in text and "auto_functionalized_v2(cp_in_place" in text
    (warning,) = warnings(caplog)
    assert "auto_functionalized_v2 runs on gathered tensors" in warning


def to_an_argument(x):
    return x.add_(1) * 2


def to_a_view_of_an_argument(x):
    first = x[:, :4]
    first.add_(1)
    return x * 2


@pytest.mark.parametrize("fn", [to_an_argument, to_a_view_of_an_argument])
def test_the_caller_sees_what_is_written_into_a_sharded_argument(mesh, fn):
    text = localised(fn, torch.zeros(2, 16, 8), mesh=mesh, shard=SHARD).text
    (copy,) = re.findall(r"copy_\(arg0_1, (\w+)\)", text)
    (parts,) = re.findall(rf"{copy} = aten.cat\((.*), dim=1\)", text)
    assert parts.count("getitem") == mesh.size()
