"""Models that ask for float32 by hand, in float64 all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.support.bounds import default_dtype


class _Float64(TorchFunctionMode):
    """Whatever is brought to float32 is brought to float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [_wider(x) for x in args]
        named = {name: _wider(x) for name, x in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(
            *given, **named
        )


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def in_float64(model: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call of a model that is in float64, so that all of it is."""

    def step(**inputs: Any) -> Any:
        with default_dtype(torch.float64), _Float64():
            return model(**inputs)

    return step
