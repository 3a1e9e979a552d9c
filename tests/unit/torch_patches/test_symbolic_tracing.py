"""What a rank does whose compilation with a symbolic length fails."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from cpcompile.errors import InputError
from cpcompile.ranks import agreement
from cpcompile.ranks.agreement import Message
from cpcompile.torch_patches import symbolic_tracing
from tests.golden.capture import fake_group


@pytest.fixture
def told(monkeypatch):
    """The messages of this rank to the others, who had compiled without an error."""
    messages = []

    def exchange(group, message, *waits):
        messages.append(message)
        return [message, Message(message.text)]

    monkeypatch.setattr(agreement, "exchange", exchange)
    with fake_group(0, 2):
        yield messages


def new_length() -> torch.SymInt:
    environment, source = ShapeEnv(), ConstantSource("length")
    symbol = environment.create_symbol(64, source, DimDynamic.DYNAMIC)
    return environment.create_symintnode(symbol, hint=64, source=source)


def attempt(compile_graph):
    return symbolic_tracing.attempt(
        [lambda: (*compile_graph(), (new_length(),))],
        dist.group.WORLD,
        "forward",
        (InputError,),
    )


def failing(error):
    def compile_graph():
        raise error

    return compile_graph


def test_what_torch_raises_is_told_and_logged(told, caplog):
    with caplog.at_level(logging.INFO, "cpcompile.torch_patches.symbolic_tracing"):
        assert attempt(failing(TypeError("no symbols here\nmore"))) is None
    assert told == [Message(error="TypeError: no symbols here\nmore")]
    assert "forward serves the sizes of one call only: no symbols here" in caplog.text


def test_an_error_for_the_user_is_raised_after_the_others_know(told):
    """Else they would wait for this rank, which has gone."""
    with pytest.raises(InputError, match="a wrong dimension"):
        attempt(failing(InputError("a wrong dimension")))
    assert told == [Message(error="InputError: a wrong dimension", final=True)]


def failed(group, message, *_):
    return [message, Message(error="MemoryError")]


@pytest.mark.parametrize(
    ("name", "function", "why"),
    [
        ("exchange", failed, "compiles forward, and rank 1 cannot: MemoryError"),
        ("all_equal", lambda *_: False, "the ranks need different guards on it"),
    ],
)
def test_other_ranks_failed(told, caplog, monkeypatch, name, function, why):
    monkeypatch.setattr(agreement, name, function)
    with caplog.at_level(logging.INFO, "cpcompile.torch_patches.symbolic_tracing"):
        assert attempt(lambda: ("compiled", {})) is None
    assert "serves the sizes of one call only: " in caplog.text
    assert why in caplog.text


def test_the_first_way_that_can_is_taken(caplog):
    length = new_length()

    def way(made):
        return lambda: ("made", {}, (length,)) if made else failing(TypeError("no"))()

    level = caplog.at_level(logging.INFO, "cpcompile.torch_patches.symbolic_tracing")
    with fake_group(0, 1), level:
        given = (dist.group.WORLD, "forward", ())
        assert symbolic_tracing.attempt([way(False), way(True)], *given) == "made"
        assert "serves one" not in caplog.text
        assert symbolic_tracing.attempt([way(False), way(False)], *given) is None
    assert caplog.text.count("serves the sizes of one call only: no") == 1
