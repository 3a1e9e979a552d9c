"""Try what is claimed of a mixer, on numbers: which entries change which results.

entries of one half of q change            results of that half change, by the claim
results of the other half have changed     "q" is not independent along "heads"
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpcompile.ops.mixers.mixer import Mixer, arguments_by_name, result_name
from cpcompile.ops.mixers.registry import mixer_of

_EPSILONS = 1e4
"""Results computed in parts may differ by so many roundings of float32."""


@dataclass(frozen=True)
class MixerReport:
    """What was tried of a mixer.

    tried: one line for each claim. false: one line for each claim that does not hold.
    """

    name: str
    tried: tuple[str, ...]
    false: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Tell whether all claims hold."""
        return not self.false

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.tried)} claims tried"]
        lines += [f"  holds: {x}" for x in self.tried if x not in self.false]
        lines += [f"  FALSE: {x}" for x in self.false]
        return "\n".join(lines)


def verify_mixer(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> MixerReport:
    """Try what is claimed of a mixer on these arguments."""
    mixer = mixer_of(function)
    assert mixer is not None, f"nothing is claimed of {function}"
    trial = _Trial(function, mixer, args, kwargs)
    tried: list[str] = []
    false: list[str] = []
    with torch.no_grad():
        for text, holds in trial.claims():
            tried.append(text)
            if not holds:
                false.append(text)
    return MixerReport(function.__qualname__, tuple(tried), tuple(false))


class _Trial:
    def __init__(
        self,
        function: Callable[..., Any],
        mixer: Mixer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.function, self.mixer = function, mixer
        arguments = arguments_by_name(function, args, kwargs)
        self.names = {mixer.name(own): x for own, x in arguments.items()}
        self.args, self.kwargs = args, kwargs
        self.whole = self._results({})

    def claims(self) -> Iterator[tuple[str, bool]]:
        """Yield every claim in words, and whether it holds."""
        for dimension, dims in self.mixer.independent.items():
            for name in sorted(set(dims) & set(self._tensors())):
                x = self.names[name]
                if x.shape[dims[name]] > 1:
                    where = f'argument "{name}", dimension {dims[name]} ("{dimension}")'
                    text = f"{where}: entries change no results of others"
                    yield text, self._is_independent(name, dims)
            for name in self.whole:
                if name not in dims:
                    text = f'result "{name}" has a dimension for "{dimension}"'
                    yield text, False
        for name, dim in self.mixer.tokens.items():
            if name in self.whole:
                where = f'result "{name}", dimension {dim}: '
                yield f"{where}as many as tokens", self._follows(name, dim)
        state = self.mixer.state
        if state is not None and state.initial not in self._tensors():
            for text, holds in self._state_claims():
                yield text, holds

    def _tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in self.names.items() if isinstance(x, Tensor)}

    def _is_independent(self, name: str, dims: Mapping[str, int]) -> bool:
        """Tell whether each half of an argument's entries leaves the other's alone."""
        dim = dims[name]
        size = self.names[name].shape[dim]
        half = size // 2
        for start, count in ((0, half), (half, size - half)):
            other = self.names[name].clone()
            part = other.narrow(dim, start, count)
            part.copy_(part * 0.5 if part.is_floating_point() else part.flip(dim))
            changed = self._results({name: other})
            for result in set(changed) & set(dims):
                at = dims[result]
                whole = self.whole[result]
                per_entry = max(whole.shape[at] // size, 1)
                index = torch.tensor(
                    [
                        x
                        for x in range(whole.shape[at])
                        if not start <= x // per_entry < start + count
                    ]
                )
                if not _close(
                    whole.index_select(at, index),
                    changed[result].index_select(at, index),
                ):
                    return False
        return True

    def _follows(self, name: str, dim: int) -> bool:
        """Tell whether half of the tokens give half of a result's dimension."""
        part = self._results(self._part(0, self._tokens // 2))
        return part[name].shape[dim] == self._tokens // 2

    def _state_claims(self) -> Iterator[tuple[str, bool]]:
        state, half = self.mixer.state, self._tokens // 2
        assert state is not None
        first = self._results(self._part(0, half), {state.final: True})
        rest = self._part(half, self._tokens - half)
        given = {state.initial: first[state.result]}
        second = self._results(rest, {state.final: True} | given)
        for name, dim in self.mixer.tokens.items():
            if name in self.whole:
                whole = torch.cat([first[name], second[name]], dim)
                text = (
                    f'"{state.initial}" and "{state.result}": result "{name}" is that '
                    "of two parts, one after the other"
                )
                yield text, _close(whole, self.whole[name])
        zero = self._results(rest, {state.final: True})[state.result]
        from_first = second[state.result] - zero
        twice = {state.initial: first[state.result] * 2}
        doubled = self._results(rest, {state.final: True} | twice)[state.result] - zero
        yield (
            f'"{state.result}" is affine in "{state.initial}"',
            _close(from_first * 2, doubled),
        )
        no_values = {x: torch.zeros_like(self.names[x]) for x in state.values}
        nothing = self._results(no_values, {state.final: True})[state.result]
        yield (
            f'"{state.result}" is zero without {", ".join(state.values)}',
            _close(nothing, torch.zeros_like(nothing)),
        )

    @property
    def _tokens(self) -> int:
        return next(
            int(x.shape[self.mixer.tokens[name]])
            for name, x in self._tensors().items()
            if name in self.mixer.tokens
        )

    def _part(self, start: int, count: int) -> dict[str, Any]:
        """Return the arguments that have tokens, with some of these."""
        return {
            name: x.narrow(self.mixer.tokens[name], start, count)
            for name, x in self._tensors().items()
            if name in self.mixer.tokens
        }

    def _results(
        self, changed: dict[str, Any], more: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Call the function with other arguments; return its tensors by name."""
        values = {id(self.names[k]): x for k, x in changed.items()}
        args = [values.get(id(x), x) for x in self.args]
        kwargs = {k: values.get(id(x), x) for k, x in self.kwargs.items()}
        results = self.function(*args, **{**kwargs, **(more or {})})
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        named = enumerate(results)
        return {result_name(i): x for i, x in named if isinstance(x, Tensor)}


def _close(x: Tensor, y: Tensor) -> bool:
    bound = _EPSILONS * torch.finfo(torch.float32).eps
    scale = max(float(x.abs().max()), float(y.abs().max()), 1e-30)
    return float((x - y).abs().max()) <= bound * scale if x.numel() else True
