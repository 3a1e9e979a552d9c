"""Processes that interpret Triton kernels, kept for the whole run."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cpu.workers import Pools
from tests.kernels.generated_module import InterpreterPool
from tests.kernels.interpreter import launched


class InterpreterPools(Pools):
    """The pool of each world size, made when it is first asked for."""

    def __missing__(self, world: int) -> InterpreterPool:
        return self.setdefault(world, InterpreterPool(world))


@pytest.fixture(scope="session")
def interpreters() -> Iterator[InterpreterPools]:
    """gloo ranks whose Triton kernels are interpreted; `interpreters[4]` has 4."""
    pools = InterpreterPools()
    yield pools
    pools.close()


@pytest.fixture
def interpreter(interpreters: InterpreterPools) -> Callable[..., Any]:
    """Calls a function of cpcompile.kernels by its name, in a process of these."""

    def call(name: str, *args: Any, **more: Any) -> Any:
        return interpreters[1].run(launched, name, args, more)[0]

    return call
