"""What is said of a graph break."""

import os

import pytest
import torch
import torch._dynamo

from cpcompile.reporting.break_texts import (
    NESTED,
    REMOVE_IT,
    place_text,
    way_out,
)
from cpcompile.torch_patches.graph_breaks import reason_text

USER = ("/home/me/train.py", 17)
LIBRARY = (os.path.join(os.path.dirname(torch.__file__), "nn", "module.py"), 3)


@pytest.mark.parametrize(
    ("stack", "text"),
    [
        ([USER, LIBRARY], f"{LIBRARY[0]}:3, called at /home/me/train.py:17"),
        ([("/home/me/other.py", 1), USER], "/home/me/train.py:17"),
        ([LIBRARY, USER], "/home/me/train.py:17"),
        ([LIBRARY], f"{LIBRARY[0]}:3"),
        ([], "unknown line"),
    ],
)
def test_a_break_in_a_library_names_the_line_that_called_it(stack, text):
    assert place_text(stack) == text


CONTEXT = "Dynamic shape operator\n  Hint: ..\n\n  Developer debug context: {}\n"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("\nfirst\nsecond", "first"),
        ("", "no reason"),
        (
            CONTEXT.format("aten._ctc_loss.Tensor"),
            "Dynamic shape operator: aten._ctc_loss.Tensor",
        ),
        (
            CONTEXT.format("call_function args: " + 9 * "TensorVariable() "),
            "Dynamic shape operator",
        ),
    ],
)
def test_a_reason_is_one_line_and_names_what_breaks(given, text):
    assert reason_text(given) == text


def test_ways_out():
    """What follows in callers, and a recurrent layer, may stay in one graph."""
    assert "allow_rnn = True" in way_out(
        "Hint: Set torch._dynamo.config.allow_rnn=True"
    )
    assert way_out("print") == way_out("print", [USER]) == REMOVE_IT
    assert way_out("print", [USER, LIBRARY]) == f"{REMOVE_IT}, or {NESTED}"
    with torch._dynamo.config.patch(nested_graph_breaks=True):
        assert way_out("print", [USER, LIBRARY]) == REMOVE_IT
