"""A call of a mixer, as text: what is called, with which constants, on which tensors.

    cp::mixer([q, k, v], '{"function": "fla.ops:chunk_kda", "tensors": {..}, ..}')

The text is a part of every cache key, and enough to make the call in another process.
Every argument has its name in it, however the program gives it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from cpcompile.ops.mixers.mixer import Mixer, arguments_by_name, result_name
from cpcompile.ops.mixers.registry import function_key, mixer_of, registered
from cpcompile.torch_private import pytree

_CONSTANTS = (bool, int, float, str, type(None))
_TUPLE = "tuple"
_FEW = 2
TEXT_OF_CALL = '{"function": '
"""How the text of every call begins."""


class UnknownForm(Exception):
    """Raised for a call of a form that nothing is known of."""


@dataclass(frozen=True)
class MixerCall:
    """A call without its tensors.

    function: its name, to be imported. tensors: the arguments that are tensors, in the
    order of the operands. constants: the other arguments, by name. results: whether
    each of several results is a tensor; None if there is one. autocast: dtypes by type
    of device.
    """

    function: str
    tensors: tuple[str, ...]
    constants: dict[str, Any]
    results: tuple[bool, ...] | None = None
    autocast: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> tuple[MixerCall, list[Tensor]]:
        """Return a call, and its tensors.

        Raises: UnknownForm.
        """
        mixer = mixer_of(function)
        assert mixer is not None, f"{function} is no mixer"
        try:
            arguments = arguments_by_name(function, args, kwargs)
        except TypeError as error:
            raise UnknownForm(str(error)) from error
        tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
        constants = {n: x for n, x in arguments.items() if n not in tensors}
        ndims = {mixer.name(n): x.ndim for n, x in tensors.items()}
        known = {mixer.name(n): x for n, x in arguments.items()}
        key = function_key(function)
        call = cls(key, tuple(tensors), constants, autocast=_autocast())
        str(call)  # raises UnknownForm for what is no constant
        problem = mixer.problem(known, ndims)
        if problem:
            raise UnknownForm(problem)
        operands = [*tensors.values()]
        results = call.empty_results(operands)
        if isinstance(results, Tensor):
            return call, operands
        if not isinstance(results, tuple | list) or not all(
            x is None or isinstance(x, Tensor) for x in results
        ):
            raise UnknownForm(f"a result of type {type(results).__name__}")
        return replace(call, results=tuple(x is not None for x in results)), operands

    @classmethod
    @functools.cache
    def of_text(cls, text: str) -> MixerCall:
        """Return what `str` has written."""
        return cls(**json.loads(text, object_hook=_decoded))

    def __str__(self) -> str:
        """Return the text that operators take."""
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        by_name = {x.name: getattr(self, x.name) for x in fields(self)}
        return json.dumps(_encoded(by_name))

    @property
    def mixer(self) -> Mixer:
        """What is known of the function."""
        mixer = mixer_of(_function(self.function))
        assert mixer is not None, self.function
        return mixer

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors, by `Mixer`."""
        return tuple(map(self.mixer.name, self.tensors))

    @property
    def result_names(self) -> list[str]:
        """Names of the results that are tensors, by `Mixer`."""
        results = (True,) if self.results is None else self.results
        return [result_name(i) for i, is_tensor in enumerate(results) if is_tensor]

    @property
    def readable(self) -> str:
        """The call as it is written in a program, with the tensors by their names."""
        constants = (f"{name}={x!r}" for name, x in self.constants.items())
        around = "".join(f" autocast({x}, {dtype})" for x, dtype in self.autocast)
        return f"{self.function}({', '.join([*self.tensors, *constants])}){around}"

    @property
    def short_name(self) -> str:
        """Name of the function, for people."""
        return self.function.rpartition(":")[2].rpartition(".")[2]

    def with_argument(self, name: str) -> MixerCall:
        """Return the call with one more tensor, by its name in `Mixer`."""
        own = self._name(name)
        constants = {k: x for k, x in self.constants.items() if k != own}
        return replace(self, tensors=(*self.tensors, own), constants=constants)

    def with_final_state(self) -> MixerCall:
        """Return the call that returns the last state, too."""
        state = self.mixer.state
        assert state is not None, f"{self.function} has no state"
        constants = self.constants | {self._name(state.final): True}
        return replace(self, constants=constants, results=(True, True))

    def empty_state(self, arguments: Mapping[str, Tensor]) -> Tensor:
        """Return the last state without data, of a call that returns it."""
        state = self.mixer.state
        assert state is not None, f"{self.function} has no state"
        results = self.empty_results([arguments[name] for name in self.names])
        empty: Tensor = results[self.result_names.index(state.result)]
        return empty

    def _name(self, name: str) -> str:
        """Return the name that the function has for an argument."""
        parameters = inspect.signature(_function(self.function)).parameters
        return next((x for x in parameters if self.mixer.name(x) == name), name)

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Make the call, and return the results that are tensors."""
        results = self._call(tensors)
        if isinstance(results, Tensor):
            return [results]
        return [x for x in results if x is not None]

    def empty_results(self, tensors: Sequence[Tensor]) -> Any:
        """Return results without data, as they are nested.

        The function runs on few tokens, without data. A kernel that cannot is asked of
        the table. One token would be another case: that of a step of generation.

        Raises: UnknownForm if neither works.
        """
        mixer = self.mixer
        dims = [mixer.tokens.get(name) for name in self.names]
        size = next(
            (x.shape[d] for x, d in zip(tensors, dims, strict=True) if d is not None), 1
        )
        few = min(size, _FEW) if isinstance(size, int) else _FEW
        short = [
            _form(x) if d is None else _form(x).with_size(d, few)
            for x, d in zip(tensors, dims, strict=True)
        ]
        with torch.no_grad():
            try:
                forms = self._lengthened(self._forms(short, tensors), size)
            except (
                Exception
            ) as error:  # whatever a kernel says to a tensor without data
                if mixer.results is None:
                    text = f"{self.short_name} on tensors without data: {error}"
                    raise UnknownForm(text) from error
            else:
                return pytree.tree_map_only(_Form, lambda x: x.like(tensors[0]), forms)
            arguments = dict(zip(self.names, tensors, strict=True))
            constants = {mixer.name(name): x for name, x in self.constants.items()}
            results = mixer.results(constants | arguments)
            return pytree.tree_map_only(Tensor, lambda x: x.new_empty(x.shape), results)

    def _forms(self, short: Sequence[_Form], tensors: Sequence[Tensor]) -> Any:
        """Return the forms of results for operands of these forms; they are remembered.

        A layer asks a dozen times, and layers repeat. tensors: the operands, which
        differ from the forms in the number of tokens alone.
        """
        key = None
        if all(isinstance(n, int) for x in short for n in x.shape):
            key = str(self), _function(self.function), tuple(short)
            if key in _known_results:
                return _known_results[key]
        given = [
            form.like(x) if name in self.mixer.tokens else x
            for x, form, name in zip(tensors, short, self.names, strict=True)
        ]
        forms = pytree.tree_map(_form, self._call(given))
        if key is not None:
            _known_results[key] = forms
        return forms

    def _lengthened(self, results: Any, size: Any) -> Any:
        dims = self.mixer.tokens
        if isinstance(results, _Form):
            return _lengthen(results, dims.get(result_name(0)), size)
        return tuple(
            _lengthen(x, dims.get(result_name(i)), size) for i, x in enumerate(results)
        )

    def _call(self, tensors: Sequence[Tensor]) -> Any:
        arguments = self.constants | dict(zip(self.tensors, tensors, strict=True))
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, getattr(torch, dtype)))
            return _function(self.function)(**arguments)


@dataclass(frozen=True)
class _Form:
    """What a tensor is, but for its values."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device

    def with_size(self, dim: int, size: Any) -> _Form:
        """Return the form with another size of a dimension."""
        return replace(self, shape=(*self.shape[:dim], size, *self.shape[dim:][1:]))

    def like(self, other: Tensor) -> Tensor:
        """Return such a tensor, fake if the other is, also outside of its mode."""
        return other.new_empty(self.shape, dtype=self.dtype, device=self.device)


_known_results: dict[Any, Any] = {}


def _form(x: Any) -> Any:
    """Return the form of a tensor; anything else is returned."""
    if not isinstance(x, Tensor):
        return x
    return _Form(tuple(x.shape), x.dtype, x.device)


def _encoded(x: Any) -> Any:
    """Return a constant as JSON has it; Raises: UnknownForm."""
    if isinstance(x, tuple):
        return {_TUPLE: [_encoded(value) for value in x]}
    if isinstance(x, list):
        return [_encoded(value) for value in x]
    if isinstance(x, Mapping) and _TUPLE not in x:
        return {key: _encoded(value) for key, value in x.items()}
    if type(x) in _CONSTANTS:
        return x
    is_tensor = isinstance(x, Tensor)
    what = (
        "a list of tensors" if is_tensor else f"an argument of type {type(x).__name__}"
    )
    raise UnknownForm(what)


def _decoded(x: dict[str, Any]) -> Any:
    """Undo _encoded for an object of JSON, whose values are decoded."""
    return tuple(x[_TUPLE]) if _TUPLE in x else x


def is_found_by_name(function: Any) -> bool:
    """Tell whether a call by name calls this very function.

    One that only has the name of another may do more than that.
    """
    try:
        return _function(function_key(function)) is function
    except (AttributeError, ImportError):
        return False


def _function(key: str) -> Callable[..., Any]:
    """Return the function of a name; a registered one before one to be imported.

    It may be another one the next time, as a cell of a notebook is run again.
    """
    function = registered(key)
    if function is not None:
        return function
    module, _, name = key.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))  # type: ignore[return-value]


def _autocast() -> tuple[tuple[str, str], ...]:
    """Return the dtype of every autocast that is on."""
    return tuple(
        (device, str(torch.get_autocast_dtype(device)).removeprefix("torch."))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    )


def _lengthen(x: Any, dim: int | None, size: Any) -> Any:
    return x if x is None or dim is None else x.with_size(dim, size)
