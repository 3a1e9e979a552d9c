"""Processes that interpret Triton kernels, kept for the whole run."""

from collections.abc import Iterator

import pytest

from tests.cpu.workers import Pools
from tests.kernels.generated_module import InterpreterPool
from tests.kernels.interpreter import Interpreter


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


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """A process for functions of cpcompile.kernels, of one test file."""
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()
