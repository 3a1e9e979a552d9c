"""What is known of a function that mixes tokens: which dimensions are what.

y, state = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=s)

tokens       q, k, v, g, beta and y: dimension 1
independent  heads: dimension 2 of these, dimension 1 of the states
state        enters as initial_state, is asked for by output_final_state
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cpcompile.cost.mixer_shapes import MixerShape
from cpcompile.errors import InputError

RESULT = "return"
"""The name of a result in claims; it stands for `return[0]`, the first of several."""


@dataclass(frozen=True)
class MixerState:
    """How a recurrence carries what earlier tokens have left, from call to call.

    The state after some tokens has to be affine in the state before them, entry by
    entry of `rows`: s' = A s + B. With `rows` None, A is one number per entry.

    initial: the argument that takes the state before the first token; None is zero.
    final: the argument that asks for the state after the last one, by True.
    result: the result that has it.
    values: arguments that enter B alone: with zeros in their place, B is zero.
    rows: the dimension of the state that A mixes; the other dimensions of a value's
        entries, `columns`, are alike.
    columns: the dimension of the state that only `values` have: the one after `rows`,
        and the last one of `values`, which is a single argument then.
    """

    initial: str
    final: str
    result: str
    values: tuple[str, ...]
    rows: int | None = None
    columns: int | None = None


@dataclass(frozen=True)
class Mixer:
    """A function that mixes tokens, and what is claimed of it.

    tokens: the dimension of the tokens, by name of an argument or a result.
    independent: by name of a dimension, such as "heads": where it is in arguments and
        results. Entries do not meet, and what is not listed is the same for all, as is
        an argument of fewer dimensions.
    state: how it is called in parts, one after another; None if it cannot be.
    results: returns empty results for arguments by their names; None: the function is
        run on fake tensors.
    aliases: other names of its arguments, by the name that is used here.
    ndims: the numbers of dimensions that its tensors must have for this to hold.
    others: the arguments without a role that change nothing of it; None: all of them.
    shape: returns the sizes of arguments by their names, by which a kernel is priced
        that cannot run without data; None: it is taken to read its operands once.
    """

    tokens: Mapping[str, int]
    independent: Mapping[str, Mapping[str, int]]
    state: MixerState | None = None
    results: Callable[[Mapping[str, Any]], Any] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    ndims: Mapping[str, int] = field(default_factory=dict)
    others: frozenset[str] | None = None
    shape: Callable[[Mapping[str, Any]], MixerShape] | None = None

    def __post_init__(self) -> None:
        """Call every result by its number, whichever name the claims use."""
        own = {name: _of_results(dims) for name, dims in self.independent.items()}
        object.__setattr__(self, "tokens", _of_results(self.tokens))
        object.__setattr__(self, "independent", own)
        state = self.state
        if state is not None and state.result == RESULT:
            object.__setattr__(self, "state", replace(state, result=result_name(0)))

    def problem(self, arguments: Mapping[str, Any], ndims: Mapping[str, int]) -> str:
        """Say why nothing is known of a call; "" if this holds for it.

        A switch that is off, or nothing, is never a reason.

        Args:
            arguments: of a call, by their names here. ndims: of those that are tensors.
        """
        state = self.state
        known = self.names() | set(self.others or ())
        if state is not None:
            known |= {state.initial, state.final, *state.values}
        for name, x in arguments.items():
            if (
                name in self.ndims
                and ndims.get(name, self.ndims[name]) != self.ndims[name]
            ):
                return f"{name} of {ndims[name]} dimensions"
            is_off = name not in ndims and (x is None or x is False)
            if self.others is not None and name not in known and not is_off:
                return f"{name} is given"
        return ""

    def names(self) -> set[str]:
        """Return all names of arguments and results that are said to have a role."""
        maps = [self.tokens, *self.independent.values()]
        return {name for names in maps for name in names}

    def name(self, own: str) -> str:
        """Return the name that is used here for an argument of the function."""
        return self.aliases.get(own, own)


def arguments_by_name(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by their names.

    Raises: TypeError if the function takes no such arguments, or not by name.
    """
    bound = inspect.signature(function).bind(*args, **kwargs)
    arguments: dict[str, Any] = {}
    for name, x in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= x
        elif kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.POSITIONAL_ONLY,
        ):
            raise TypeError(f"{name} has no names")
        else:
            arguments[name] = x
    return arguments


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states for tokens of a dtype."""
    return torch.promote_types(dtype, torch.float32)


def result_name(index: int) -> str:
    """Return the name of one of the results of a call."""
    return f"{RESULT}[{index}]"


def _of_results(dims: Mapping[str, int]) -> dict[str, int]:
    return {result_name(0) if x == RESULT else x: dim for x, dim in dims.items()}


def _is_result(name: str) -> bool:
    return re.fullmatch(rf"{RESULT}\[\d+\]", name) is not None


def check_claims(function: Callable[..., Any], mixer: Mixer) -> None:
    """Raise InputError for claims that no function, or not this one, can fulfil."""
    if mixer.state is not None:
        _check_state(function.__qualname__, mixer.state)
    parameters = inspect.signature(function).parameters
    if any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        return
    known = set(map(mixer.name, parameters))
    state = mixer.state
    of_state = () if state is None else (state.initial, state.final, *state.values)
    unknown = sorted(
        name
        for name in {*mixer.names(), *of_state}
        if name not in known and not _is_result(name)
    )
    if unknown:
        raise InputError(
            f"register_mixer: {function.__qualname__} has no argument "
            f"{', '.join(map(repr, unknown))}; it has {', '.join(parameters)}, and "
            f'results are called "{RESULT}", and "{RESULT}[1]" and so on, of several'
        )
    if not any(map(_is_result, mixer.tokens)):
        raise InputError(
            f"register_mixer: the tokens of {function.__qualname__} are "
            f"{dict(mixer.tokens)}, of no result; needed the dimension of its "
            f'results too, such as tokens={{"x": 1, "{RESULT}": 1}}'
        )


def _check_state(name: str, state: MixerState) -> None:
    """Raise InputError for a state whose summary could not be computed."""
    problem = ""
    if not (state.initial and state.final and state.result):
        problem = "initial, final and result are needed, a name each"
    elif not state.values:
        problem = "values is empty; needed the arguments that enter B alone"
    elif (state.rows is None) != (state.columns is None):
        problem = "needed both rows and columns, or neither"
    elif state.rows is not None and (
        state.columns != state.rows + 1 or not state.columns
    ):
        problem = "needed columns = rows + 1, as of states [.., rows, columns]"
    elif state.rows is not None and len(state.values) > 1:
        problem = "needed one argument in values, whose last dimension is columns"
    if problem:
        raise InputError(f"register_mixer: the state of {name} is {state}: {problem}")
