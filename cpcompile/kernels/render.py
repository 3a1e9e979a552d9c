"""Render the step templates outside of Inductor, with hooks like its own.

Sizes and strides become arguments of the kernel, so one compiled kernel serves all
shapes with the same constants.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jinja2

from cpcompile.kernels.configs import Kernel

OUTPUT = "OUT"  # stands for the tensor that `store_output` writes
_DEFINITION = "<definition of the kernel>"


@dataclass(frozen=True)
class Argument:
    """A run-time argument: a tensor (dim None), or its size or stride in a dim."""

    name: str
    tensor: str
    dim: int | None = None
    is_stride: bool = False


@dataclass(frozen=True)
class RenderedKernel:
    """A kernel: its text, the function that Triton made of it, and its arguments."""

    source: str
    function: Any
    arguments: tuple[Argument, ...]

    def signature(self, types: Mapping[str, str]) -> dict[str, str]:
        """Return the type of each argument, as an ahead-of-time compile takes it.

        `types` is tensor -> "bf16" and so on. Integers are 32-bit.
        """
        return {
            x.name: f"*{types[x.tensor]}" if x.dim is None else "i32"
            for x in self.arguments
        }


@functools.cache
def source(kernel: Kernel) -> str:
    """Return a template: its file, its own functions, and those of several kernels."""
    files = ("add_dkdv", "row_tiles") if kernel is Kernel.DKDV else ()
    own = "".join(map(_text, files))
    return _text(kernel.value) + own + _text("shared")


def rendered(
    kernel: Kernel,
    constants: Mapping[str, Any],
    ranks: Mapping[str, int],
    functions: str = "",
) -> RenderedKernel:
    """Render a kernel with these constants; `ranks` is tensor -> number of dims.

    ranks: in the order of the tensors. functions: those of a score_mod, see
    score_functions.py.
    INDEX_DTYPE must be among the constants: "tl.int64" if any tensor needs it. Equal
    arguments give the same object, so Triton's own cache of binaries stays with it.
    """
    return _rendered(kernel, tuple(constants.items()), tuple(ranks.items()), functions)


@functools.cache
def _rendered(
    kernel: Kernel,
    constants: tuple[tuple[str, Any], ...],
    ranks: tuple[tuple[str, int], ...],
    functions: str,
) -> RenderedKernel:
    hooks = _Hooks(f"cp_{kernel.value}", dict(constants), dict(ranks))
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    text = environment.from_string(source(kernel)).render(
        def_kernel=hooks.def_kernel,
        size=hooks.size,
        stride=hooks.stride,
        store_output=hooks.store_output,
        **hooks.constants,
        **({"score_functions": functions} if functions else {}),
    )
    text = text.replace(_DEFINITION, hooks.definition())
    return RenderedKernel(text, _load(hooks.name, text), tuple(hooks.arguments))


class _Hooks:
    """The hooks that a template calls; they collect the arguments that it needs."""

    def __init__(
        self, name: str, constants: dict[str, Any], ranks: dict[str, int]
    ) -> None:
        self.name = name
        self.constants = constants
        self.ranks = ranks
        self.arguments: list[Argument] = []

    def def_kernel(self, *names: str) -> str:
        assert names == tuple(self.ranks), f"{self.name}: {names}, not {self.ranks}"
        self.arguments = [Argument(f"arg_{x}", x) for x in names]
        self.arguments.append(Argument("out_ptr", OUTPUT))
        return _DEFINITION

    def definition(self) -> str:
        """Return imports, signature and constants, known only after the rest."""
        lines = [
            "import triton",
            "import triton.language as tl",
            "",
            "",
            "@triton.jit",
            f"def {self.name}({', '.join(x.name for x in self.arguments)}):",
            *(f"    {k}: tl.constexpr = {v}" for k, v in self.constants.items()),
            *(f"    {x} = arg_{x}" for x in self.ranks),
        ]
        return "\n".join(lines)

    def size(self, tensor: str, dim: int) -> str:
        return self._integer(Argument(f"size_{tensor}_{dim}", tensor, dim))

    def stride(self, tensor: str) -> str:
        dims = range(self.ranks[tensor])
        return ", ".join(self._stride(tensor, dim) for dim in dims)

    def store_output(
        self,
        indices: tuple[str, ...],
        value: str,
        mask: str | None = None,
        val_shape: tuple[str, ...] = (),
    ) -> str:
        last = len(indices) - 1
        strides = [self._stride(OUTPUT, dim) for dim in range(last)]
        products = [f"{i} * {x}" for i, x in zip(indices, strides, strict=False)]
        offset = " + ".join([*products, indices[last]])
        shape = ", ".join(val_shape)
        masked = f", mask={mask}" if mask else ""
        return (
            f"tl.store(out_ptr + tl.broadcast_to({offset}, [{shape}]), {value}{masked})"
        )

    def _stride(self, tensor: str, dim: int) -> str:
        if tensor != OUTPUT and dim == self.ranks[tensor] - 1:
            return "1"
        name = f"stride_{tensor}_{dim}"
        return self._integer(Argument(name, tensor, dim, is_stride=True))

    def _integer(self, argument: Argument) -> str:
        if argument not in self.arguments:
            self.arguments.append(argument)
        return argument.name


def _text(stem: str) -> str:
    folder = resources.files("cpcompile.kernels") / "templates"
    return (folder / f"{stem}.py.jinja").read_text(encoding="ascii")


def _load(name: str, text: str) -> Any:
    """Run the source as a module; Triton asks linecache for the text of functions."""
    filename = f"<{name} {hash(text):x}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    module: dict[str, Any] = {"__name__": name}
    exec(compile(text, filename, "exec"), module)
    return module[name]
