"""Keep what the modules of a model return, and its gradients, in a compiled run.

A hook on every module that has parameters keeps what it returns, and adds a parameter
of zeros to it, whose gradient is that of the output:

    y = attention.out(x)      ->      y = attention.out(x) + zeros;  keep y

Dynamo traces hooks that are there before it compiles. What they keep becomes a result
of the graph, and the zeros a parameter: the backend gathers the one, and sums the
gradient of the other over ranks, as it does with all results and parameters. Modules
without parameters stay as they are: a hook on the dropout of weights would take
attention that a model writes out apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from cpcompile.torch_private import pytree

_ZEROS = "_cp_zeros_of_output_"  # and the number of the module's output


class ModuleOutputs:
    """The outputs of a model's modules in one step, by name, in their order.

    copied: a copy of the model, which runs on args and kwargs to learn its outputs.
    """

    def __init__(
        self,
        model: nn.Module,
        copied: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.outputs: dict[str, Tensor] = {}
        self._numbers: dict[str, int] = {}
        self._known: set[str] | None = None
        self._hook(copied)
        copied(*args, **kwargs)
        for name, x in self.outputs.items():
            if x.requires_grad:
                path, zeros = name.rsplit(".", 1)
                parameter = nn.Parameter(torch.zeros_like(x))
                model.get_submodule(path).register_parameter(zeros, parameter)
        self._known = set(self.outputs)
        self.outputs.clear()
        self._numbers.clear()
        self._hook(model)

    def _hook(self, model: nn.Module) -> None:
        for path, module in model.named_modules():
            if path and next(module.parameters(), None) is not None:
                module.register_forward_hook(
                    lambda module, args, result, path=path: self._kept(
                        module, path, result
                    )
                )

    def _kept(self, module: nn.Module, path: str, result: Any) -> Any:
        leaves, spec = pytree.tree_flatten(result)
        for i, x in enumerate(leaves):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            number = self._numbers.get(path, 0)
            self._numbers[path] = number + 1
            zeros = f"{_ZEROS}{number}"
            name = f"{path}.{zeros}"
            # The backward of a checkpoint region runs modules once more.
            if self._known is None or name in self._known:
                if hasattr(module, zeros):
                    leaves[i] = x = x + getattr(module, zeros)
                self.outputs[name] = x
        return pytree.tree_unflatten(leaves, spec)


def is_output(name: str) -> bool:
    """Tell whether a parameter stands for an output of its module."""
    return _ZEROS in name


def place_of(kind: str, name: str, outputs: Sequence[str]) -> tuple[int, ...]:
    """Return the place of a tensor in the order in which a step makes them.

    outputs: of modules, in their order. Gradients come the other way round; that of a
    parameter is complete where the backward leaves its module.
    """
    if kind == "forward":
        return 0, outputs.index(name)
    if kind == "backward":
        return 2, -outputs.index(name), 0
    if kind != "gradient":
        return 1, int(kind == "loss")
    inside = name.rpartition(".")[0] + "."
    first = [n for n, x in enumerate(outputs) if inside != "." and x.startswith(inside)]
    return 2, -min(first, default=-1), 1


def described(kind: str, name: str) -> tuple[str, str]:
    """Return the path of a tensor's module, and in words what it is there."""
    path, _, rest = name.rpartition(".") if kind != "result" else ("", "", name)
    if kind in ("forward", "backward"):
        number = rest.removeprefix(_ZEROS)
        output = "output" if number == "0" else f"output {number}"
        return path, output if kind == "forward" else f"gradient of the {output}"
    if kind == "gradient" and not name.startswith("of input "):
        return path, f"gradient of parameter {rest}"
    return "", f"{kind} {name}"
