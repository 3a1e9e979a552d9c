"""What a program does besides computing its results."""

import pytest
import torch

from cpcompile.passes.graph.effects import enables_gradients


def with_gradients(x):
    with torch.enable_grad():
        return x.sin()


def turned_on_for_good(x):
    torch.set_grad_enabled(True)
    return x.sin()


def without_gradients(x):
    with torch.no_grad():
        return x.sin()


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        (with_gradients, True),
        (turned_on_for_good, True),
        (without_gradients, False),
        (torch.sin, False),
    ],
)
def test_programs_that_enable_gradients(program, wanted):
    """Called without gradients, so that what is in the graph decides."""
    found = []

    def backend(gm, inputs):
        found.append(enables_gradients(gm.graph))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(program, backend=backend)(torch.ones(3))
    assert any(found) == wanted, found
