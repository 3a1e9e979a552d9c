"""cp::move_runs keeps torch's contracts, and is a split and a concatenation."""

import pytest
import torch

from cpcompile.ops import move_runs

COUNTS, ORDER = [3, 0, 2, 1], [2, 3, 0, 1]
TOKENS = sum(COUNTS)


def operand(dtype=torch.float64, tokens=TOKENS):
    x = torch.randn(2, 3, tokens, 4).to(dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck(dtype):
    torch.library.opcheck(
        torch.ops.cp.move_runs.default, (operand(dtype), COUNTS, ORDER)
    )


def test_moves_runs_and_gradients_back():
    x = operand()
    found = move_runs(x, COUNTS, ORDER)
    parts = x.split(COUNTS, 2)
    wanted = torch.cat([parts[i] for i in ORDER], 2)
    assert torch.equal(found, wanted)
    assert found.is_contiguous()
    grad = torch.randn_like(found)
    (ours,) = torch.autograd.grad(found, x, grad, create_graph=True)
    (theirs,) = torch.autograd.grad(wanted, x, grad)
    assert torch.equal(ours, theirs)


def test_gradients_of_gradients():
    torch.autograd.gradcheck(lambda x: move_runs(x, COUNTS, ORDER), operand())
    torch.autograd.gradgradcheck(lambda x: move_runs(x, COUNTS, ORDER), operand())


def test_counts_are_all_tokens():
    with pytest.raises(RuntimeError, match="split_with_sizes expects"):
        move_runs(operand(tokens=7), COUNTS, ORDER)
