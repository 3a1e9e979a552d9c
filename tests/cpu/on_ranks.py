"""Tests whose bodies run on several ranks: what they assert, every rank asserts.

    @on_ranks(2)                            on two ranks
    @on_ranks("world")                      on as many as the argument of that name says
    @on_ranks(lambda case: case.world)      as its arguments say

The arguments are pickled. A body begins with seed 0, and Dynamo knows nothing. It gives
nothing back: what ranks have to agree on is for a test that calls `pools[world].run`
itself.
"""

from __future__ import annotations

import ast
import functools
import gc
import inspect
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from _pytest.assertion.rewrite import rewrite_asserts

# The own limit of a test, by pytest-timeout, is a little longer.
SECONDS = 170.0

World = int | str | Callable[..., int]


def on_ranks(
    world: World = 2, timeout: float = SECONDS
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test; `timeout` is in seconds."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(body).parameters

        @functools.wraps(body)
        def test(pools: Any, **given: Any) -> None:
            ranks = world
            if isinstance(world, str):
                ranks = given[world]
            elif callable(world):
                asked = inspect.signature(world).parameters
                ranks = world(**{name: given[name] for name in asked})
            where = (inspect.getfile(body), body.__module__, body.__name__)
            call = (run_body, *where, pickle.dumps(given))
            pools[ranks].run(*call, timeout=timeout)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = inspect.Parameter("pools", kind)
        signature = inspect.Signature([own, *parameters.values()])
        vars(test).update(__signature__=signature, body=body)
        return test

    return decorate


def run_body(path: str, module: str, name: str, given: bytes) -> None:
    """Run the body of a test on this rank."""
    test = getattr(load(path, module), name)
    torch._dynamo.reset()
    torch.manual_seed(0)  # whatever the file has drawn
    test.body(**pickle.loads(given))


def load(path: str, name: str) -> ModuleType:
    """Load a file of tests as pytest does: a failing assertion says the values."""
    if name not in sys.modules:
        source = Path(path).read_bytes()
        tree = ast.parse(source, path)
        rewrite_asserts(tree, source, path)
        module = sys.modules[name] = ModuleType(name)
        module.__file__ = path
        exec(compile(tree, path, "exec", dont_inherit=True), vars(module))
        gc.collect()
        gc.freeze()  # what is imported stays, and is not looked at again
    return sys.modules[name]
