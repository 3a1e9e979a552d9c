"""Find what is known of a function, and the name under which it is found again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cpcompile.errors import InputError
from cpcompile.ops.mixers.known_mixers import known_mixer
from cpcompile.ops.mixers.mixer import Mixer, MixerState, check_claims

_mixers: dict[str, tuple[Callable[..., Any], Mixer]] = {}


def register_mixer(
    function: Callable[..., Any],
    *,
    tokens: Mapping[str, int],
    independent: Mapping[str, Mapping[str, int]],
    state: MixerState | None = None,
) -> None:
    """Say how a function that mixes tokens may be shared out by backend="cp".

    Calls of it stay one call in compiled programs. Their tokens are exchanged for an
    independent dimension, or, with `state`, they run on the tokens of each rank. The
    function has to be deterministic and to write to none of its arguments; it may be a
    kernel that Dynamo cannot trace. Gradients are those of its autograd formula.

        cp.register_mixer(
            my_scan,  # y = my_scan(x, gate, decay)
            tokens={"x": 1, "gate": 1, "return": 1},
            independent={
                "heads": {"x": 2, "gate": 2, "decay": 0, "return": 2},
                "batch": {"x": 0, "gate": 0, "return": 0},
            },
        )

    Args:
        function: of tensors and constants; it returns a tensor, or a tuple of tensors
            and None.
        tokens: the dimension of the tokens, by name of an argument. "return" is the
            result, or the first of several, "return[1]" the second. An argument that
            is not listed is the same for all tokens.
        independent: by any name, a dimension whose entries do not meet: where it is in
            arguments and in all results. What is not listed is the same for all.
        state: how the function is called on a part of the tokens after another.

    `cp.verify(function, ...)` tries these claims on arguments. Raises: InputError for
    an argument that the function does not have, or no dimension of the results.
    """
    if not callable(function) or not hasattr(function, "__qualname__"):
        raise InputError(
            f"register_mixer: got {function!r}; needed a function, with a name"
        )
    mixer = Mixer(dict(tokens), {k: dict(v) for k, v in independent.items()}, state)
    check_claims(function, mixer)
    _mixers[function_key(function)] = function, mixer


def mixer_of(function: Any) -> Mixer | None:
    """Return what is known of a function; None if that is nothing."""
    names = (getattr(function, x, None) for x in ("__module__", "__qualname__"))
    if not callable(function) or not all(isinstance(x, str) for x in names):
        return None  # methods of builtin types have no module
    found = _mixers.get(function_key(function))
    if found is not None and found[0] is function:
        return found[1]
    return known_mixer(function)


def function_key(function: Callable[..., Any]) -> str:
    """Return the name of a function: of its module, and in it."""
    return f"{function.__module__}:{function.__qualname__}"


def registered(key: str) -> Callable[..., Any] | None:
    """Return the function that is registered under a name, or None."""
    found = _mixers.get(key)
    return None if found is None else found[0]
