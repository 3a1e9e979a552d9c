"""Find where tokens go in x[:, 1:], x[:, :-1], x[..., 0], and a table's first rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from cpcompile.geometry.lengths import is_symbol

from ...graph.nodes import fake_value
from ...graph.sequence_tokens import TokenAxis, Tokens
from .padded_tokens import Unproved

# The difference of a size and the padded length, if that is a number.
Extra = Callable[[Any], int | None]


@dataclass(frozen=True)
class FromTheEnd:
    """The token that is `back` before the end of the tokens, or all from it on."""

    back: int
    all_behind: bool = False


def indexed(
    node: fx.Node, index: Any, tokens: Tokens | None, extra_of: Extra
) -> Tokens | FromTheEnd | None:
    """Return where tokens of x[index] are, for slices, numbers, None and an ellipsis.

    tokens: those of x, if it has any; else x is a table, of whose rows as many are
        taken as there are tokens.

    Raises: Unproved.
    """
    value = fake_value(node.args[0])
    parts = list(index) if isinstance(index, tuple) else [index]
    lists = [x for x in parts if isinstance(x, list)]
    numbers = [n for x in lists for n in x]
    plain = (int, slice, list)
    known = all(x is None or x is ... or isinstance(x, plain) for x in parts)
    if not known or len(lists) > 1 or not all(isinstance(n, int) for n in numbers):
        raise Unproved(f"{node.name} has indices that are values")
    if any(isinstance(x, bool) for x in (*parts, *numbers)):
        raise Unproved(f"{node.name} has bool indices")
    taken = sum(isinstance(x, plain) for x in parts)
    rest = [slice(None)] * (value.dim() - taken)
    if ... in parts:
        at = parts.index(...)
        parts[at : at + 1] = rest
    else:
        parts += rest
    dim = out = 0
    found: Tokens | None = None
    shape = fake_value(node).shape
    for part in parts:
        if part is None:
            out += 1
            continue
        here = tokens is not None and tokens.axis.dim == dim
        if isinstance(part, list):  # [..., [-2], :]: its dimension stays where it is
            if here:
                raise Unproved(f"{node.name} picks tokens")
            out += 1
        elif isinstance(part, int):
            if here and part < 0:
                _require_alone(parts)
                return FromTheEnd(-part)
        else:
            extra = extra_of(shape[out])
            if here and _is_tail(part):
                if extra is None:
                    _require_alone(parts)
                    return FromTheEnd(-part.start, all_behind=True)
                assert tokens is not None
                if extra == tokens.extra:  # it reaches farther back than the start
                    part = slice(None)
            if here and _is_all(part, tokens, extra_of):
                part = slice(None)
            if here or extra is not None:
                of = tokens if here else None
                found = _sliced(node, part, of, out, extra) or found
            out += 1
        dim += 1
    return found


def _is_tail(part: slice) -> bool:
    """Tell whether a slice takes the last n, or all if there are fewer."""
    start = part.start
    return isinstance(start, int) and start < 0 and part.stop is part.step is None


def _is_all(part: slice, tokens: Tokens | None, extra_of: Extra) -> bool:
    """Tell whether a slice takes the last n, which are all, or more than there are."""
    start = part.start
    if tokens is None or not is_symbol(start) or part.stop or part.step:
        return False
    extra = extra_of(-start)
    return extra is not None and extra >= tokens.extra


def _require_alone(parts: list[Any]) -> None:
    plain = [x for x in parts if not isinstance(x, slice) or x != slice(None)]
    if len(plain) > 1:
        raise Unproved("a token at the end is read together with a part of others")


def _sliced(
    node: fx.Node, part: slice, tokens: Tokens | None, out: int, extra: int | None
) -> Tokens | None:
    start = 0 if part.start is None else part.start
    if part == slice(None) and tokens is not None:
        axis = TokenAxis(out, tokens.axis.outer, tokens.axis.inner)
        return Tokens(axis, tokens.extra, tokens.fill)
    if not isinstance(start, int) or start < 0 or part.step not in (None, 1):
        raise Unproved(f"{node.name} counts tokens from the end, or in steps")
    if tokens is not None and not tokens.is_whole:
        raise Unproved(f"{node.name} cuts sequences that are one dimension")
    if extra is None:
        # A fixed number of tokens from the start, which every length has.
        if isinstance(part.stop, int) and part.stop >= 0:
            return None
        raise Unproved(f"{node.name} has another number of tokens")
    return Tokens(TokenAxis(out), extra, None if tokens is None else tokens.fill)
