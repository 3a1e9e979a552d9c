"""Decide what becomes of the call of a mixer that Dynamo meets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cpcompile.logs import warn_unsharded
from cpcompile.ops.mixers.in_torch import in_torch, with_documents
from cpcompile.ops.mixers.mixer_call import MixerCall, UnknownForm, is_found_by_name
from cpcompile.ops.mixers.registry import mixer_of

Kept = tuple[Callable[..., Any], str, list[Tensor], tuple[bool, ...] | None]


def is_known(function: Any) -> bool:
    """Tell whether calls of a function are decided on here."""
    return in_torch(function) is not None or mixer_of(function) is not None


def keep(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> Kept | Callable[..., Any] | None:
    """Return the operator for a call, or what is called in its place.

    None: Dynamo makes the call as it is written.
    """
    if not is_found_by_name(function):
        return None  # such as a wrapper, which Dynamo looks into
    other = in_torch(function)
    if other is not None and _is_plain(function, other, args, kwargs):
        return other
    if kwargs.get("seq_idx") is not None:
        other = with_documents(function)
        if other is not None and _is_plain(function, other, args, kwargs, ["seq_idx"]):
            return other
    if mixer_of(function) is None:
        _warn_of_form(function, "with documents, states or other options")
        return None
    taken = _taken(function)
    if taken is not None:
        kwargs = {name: x for name, x in kwargs.items() if name in taken}
    try:
        call, tensors = MixerCall.of(function, args, kwargs)
    except UnknownForm as form:
        _warn_of_form(function, str(form))
        return None
    return torch.ops.cp.mixer.default, str(call), tensors, call.results


def _warn_of_form(function: Callable[..., Any], form: str) -> None:
    warn_unsharded(
        f"what Dynamo cannot share out of {function.__qualname__} of "
        f"{function.__module__}",
        f"it is called in a form that is not known ({form}), and traced as written",
    )


def _taken(function: Any) -> tuple[str, ...] | None:
    """Return the keywords that a wrapper of transformers hands on; None: all.

    Layers give it whatever they were given.
    """
    if not function.__module__.startswith("transformers."):
        return None
    variables = inspect.getclosurevars(function).nonlocals
    return variables.get("applicable_params")


_NOT_IN_TORCH = (
    "seq_idx",
    "cu_seqlens",
    "initial_state",
    "initial_states",
    "return_final_states",
    "final_states_out",
)


def _is_plain(
    function: Any,
    other: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    takes: Sequence[str] = (),
) -> bool:
    """Tell whether `other` computes a call, which has no documents, and no states.

    Packages differ by version: both have to call the arguments alike, by position too.
    takes: what it takes all the same.
    """
    try:
        own = inspect.signature(function)
        bound = own.bind(*args, **kwargs).arguments
    except TypeError:
        return False
    values = dict(bound) | kwargs
    parameters = [*inspect.signature(other).parameters]
    alike = [*own.parameters][: len(args)] == parameters[: len(args)]
    in_transformers = function.__module__.startswith("transformers.")  # its own other
    if not in_transformers and not (alike and set(kwargs) <= set(parameters)):
        return False
    if any(isinstance(x, Tensor) and x.is_complex() for x in values.values()):
        return False
    return all(
        values.get(x) is None or values[x] is False
        for x in _NOT_IN_TORCH
        if x not in takes
    )
