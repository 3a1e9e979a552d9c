"""Read the calls of mixers that Dynamo kept whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.fx as fx
from torch import Tensor

from cpcompile.ops.mixers.mixer_call import MixerCall

from .nodes import expected_shape, fake_value


def mixed_in_parts(tensors: list[Tensor], call: str) -> list[Tensor]:
    """Return what cp::mixer does; mark in a graph that ranks pass on states."""
    return list(torch.ops.cp.mixer(tensors, call))


def is_mixer(node: fx.Node) -> bool:
    """Tell whether `node` calls a mixer that was kept whole."""
    return node.target in (torch.ops.cp.mixer.default, mixed_in_parts)


def mixer_call(node: fx.Node) -> MixerCall:
    """Return what a mixer is called with, besides its tensors."""
    return MixerCall.of_text(str(node.args[1]))


def mixer_operands(node: fx.Node) -> dict[str, fx.Node]:
    """Return the tensors of a mixer by their names."""
    tensors: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]  # a list
    return dict(zip(mixer_call(node).names, tensors, strict=True))


def mixed_tokens(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """Return the operands of a mixer that have tokens, each with that dimension."""
    tokens = mixer_call(node).mixer.tokens
    return [(x, tokens[n]) for n, x in mixer_operands(node).items() if n in tokens]


def result_roles(node: fx.Node, index: int) -> tuple[int | None, str]:
    """Return the dimension of tokens of one of several results, and its name."""
    call = mixer_call(node)
    name = call.result_names[index]
    return call.mixer.tokens.get(name), name


def independent_dims(
    node: fx.Node,
) -> Iterator[tuple[dict[fx.Node, int], dict[int, int]]]:
    """Yield where each independent dimension is in operands and results of a mixer.

    Results by their number. All of them have the dimension; an operand that has one
    entry for all is not among the operands.
    """
    call, operands = mixer_call(node), mixer_operands(node)
    for dims in call.mixer.independent.values():
        if not all(name in dims for name in call.result_names):
            continue
        pairs = [  # in an order that is the same on every rank
            (x, dims[name])
            for name, x in operands.items()
            if name in dims and _has_entries(x, dims[name])
        ]
        found = dict(pairs)
        if len(found) == len({*pairs}):  # no tensor is split in two places
            yield found, {i: dims[x] for i, x in enumerate(call.result_names)}


def _has_entries(x: fx.Node, dim: int) -> bool:
    """Tell whether an operand has more than one entry of a dimension, if it has it."""
    shape = expected_shape(fake_value(x))
    return dim < len(shape) and shape[dim] != 1
