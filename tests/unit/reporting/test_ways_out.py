"""What is said of a graph break."""

import os

import pytest
import torch
import torch._dynamo

from cpcompile.reporting.ways_out import NESTED, REMOVE_IT, GraphBreakPlace
from cpcompile.torch_patches.graph_breaks import GraphBreak, reason_text

USER = ("/home/me/train.py", 17)
LIBRARY = (os.path.join(os.path.dirname(torch.__file__), "nn", "module.py"), 3)
REASON = "Dynamic shape operator\n  Hint: ..\n\n  Developer debug context: {}\n"


def of(text, *places):
    return GraphBreakPlace.of(GraphBreak(text, places))


@pytest.mark.parametrize(
    ("places", "place"),
    [
        ([USER, LIBRARY], f"{LIBRARY[0]}:3, called at /home/me/train.py:17"),
        ([("/home/me/other.py", 1), USER], "/home/me/train.py:17"),
        ([LIBRARY, USER], "/home/me/train.py:17"),
        ([LIBRARY], f"{LIBRARY[0]}:3"),
        ([], "unknown line"),
    ],
)
def test_a_break_in_a_library_names_the_line_that_called_it(places, place):
    assert of("print", *places).place == place


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\nfirst\nsecond", "first"),
        ("", "no reason"),
        (
            REASON.format("aten._ctc_loss.Tensor"),
            "Dynamic shape operator: aten._ctc_loss.Tensor",
        ),
        (
            REASON.format("call_function args: " + 9 * "TensorVariable() "),
            "Dynamic shape operator",
        ),
    ],
)
def test_a_reason_is_one_line_and_names_what_breaks(text, reason):
    assert reason_text(text) == reason == of(text).reason


def test_the_way_out():
    recurrent = of("Hint: Set torch._dynamo.config.allow_rnn=True")
    assert "allow_rnn = True" in recurrent.fix
    assert of("print", USER).fix == of("print").fix == REMOVE_IT
    assert of("print", USER, LIBRARY).fix == f"{REMOVE_IT}, or {NESTED}"
    with torch._dynamo.config.patch(nested_graph_breaks=True):
        assert of("print", USER, LIBRARY).fix == REMOVE_IT
