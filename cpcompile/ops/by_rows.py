"""cp_whole::by_rows: a program that does the same with every row of some tensors.

AOTAutograd would write its number of rows into the graph, and rows that are sorted
belong to no token. As one operator, with one for its gradients, the program stays what
it is for any number of rows: a rank runs it on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from cpcompile.ops.listed_gradients import differentiate
from cpcompile.torch_private import pytree


class Rows(Protocol):
    """What an operator runs."""

    @property
    def arguments(self) -> tuple[bool, ...]:
        """Tell which tensors have a row per token."""

    @property
    def results(self) -> tuple[bool, ...]:
        """Tell which results have one; the others are sums over tokens."""

    def run(self, rows: int, *tensors: Tensor) -> Any:
        """Return tensors, for so many rows."""


_PROGRAMS: dict[str, Rows] = {}


def known_as(program: Rows, text: str) -> str:
    """Note a program under the text that says all of it; return its name."""
    _PROGRAMS[text] = program
    return text


def program_of(name: str) -> Rows:
    """Return the program that operators call by a name."""
    return _PROGRAMS[name]


def results_of(
    program: Rows, tensors: Sequence[Tensor], traced: bool = False
) -> list[Tensor]:
    """Run a program on the rows that its arguments have.

    traced: as calls that write to nothing, for a graph of them.
    """
    named = zip(tensors, program.arguments, strict=True)
    rows = next(x.shape[0] for x, has_rows in named if has_rows)
    run: Callable[..., Any] = partial(program.run, rows)
    run = torch.func.functionalize(run) if traced else run
    results: list[Tensor] = pytree.tree_leaves(run(*tensors))
    return results


def gradients_of(
    program: Rows,
    grads: Sequence[Tensor],
    tensors: Sequence[Tensor],
    graded: Sequence[int],
    needed: Sequence[int],
    traced: bool = False,
) -> list[Tensor]:
    """Return the gradients of the tensors `needed`; `grads` are of results `graded`."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_(i in needed) for i, x in enumerate(tensors)]
        results = results_of(program, leaves, traced)
        pairs = [(results[i], g) for i, g in zip(graded, grads, strict=True)]
        pairs = [(x, g) for x, g in pairs if x.requires_grad]
        inputs = [leaves[i] for i in needed]
        outputs, of_outputs = zip(*pairs, strict=True) if pairs else ((), ())
        found = [None] * len(inputs)
        if pairs:
            found = torch.autograd.grad(outputs, inputs, of_outputs, allow_unused=True)  # type: ignore[assignment]
    pairs_ = zip(inputs, found, strict=True)
    return [torch.zeros_like(x) if g is None else g for x, g in pairs_]


@torch.library.custom_op("cp_whole::by_rows", mutates_args=())
def by_rows(tensors: list[Tensor], program: str) -> list[Tensor]:
    """Run a program on rows; results that have rows have those of the arguments."""
    return [_own(x, tensors) for x in results_of(program_of(program), tensors)]


@torch.library.custom_op("cp_whole::by_rows_backward", mutates_args=())
def by_rows_backward(
    grads: list[Tensor],
    tensors: list[Tensor],
    graded: list[int],
    needed: list[int],
    program: str,
) -> list[Tensor]:
    """Return gradients of a program, as `gradients_of` does."""
    how = grads, tensors, graded, needed
    return [_own(x, grads) for x in gradients_of(program_of(program), *how)]


@by_rows.register_fake
def _(tensors: list[Tensor], program: str) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in results_of(program_of(program), tensors)]


by_rows_backward.register_fake(
    lambda grads, tensors, graded, needed, program: [
        tensors[i].new_empty(tensors[i].shape) for i in needed
    ]
)


def _own(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Return x in memory of its own, contiguous: an operator gives new tensors."""
    memory = {y.untyped_storage().data_ptr() for y in others}
    x = x.contiguous()
    return x.clone() if x.untyped_storage().data_ptr() in memory else x


differentiate(by_rows, by_rows_backward)

BY_ROWS = torch.ops.cp_whole.by_rows.default
BY_ROWS_BACKWARD = torch.ops.cp_whole.by_rows_backward.default
BOTH = (BY_ROWS, BY_ROWS_BACKWARD)
DECOMPOSED: dict[Any, Any] = {
    BY_ROWS: lambda tensors, name: results_of(program_of(name), tensors, True),
    BY_ROWS_BACKWARD: lambda grads, tensors, graded, needed, name: gradients_of(
        program_of(name), grads, tensors, graded, needed, True
    ),
}
