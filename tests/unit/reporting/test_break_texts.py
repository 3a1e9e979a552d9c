"""What is said of a graph break."""

import os

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


def test_a_break_in_a_library_names_the_line_that_called_it():
    assert place_text([USER, LIBRARY]) == (
        f"{LIBRARY[0]}:3, called at /home/me/train.py:17"
    )


def test_a_break_of_the_user_has_one_line():
    assert place_text([("/home/me/other.py", 1), USER]) == "/home/me/train.py:17"
    assert place_text([LIBRARY, USER]) == "/home/me/train.py:17"
    assert place_text([LIBRARY]) == f"{LIBRARY[0]}:3"
    assert place_text([]) == "unknown line"


def test_a_reason_is_one_line():
    assert reason_text("\nfirst\nsecond") == "first"
    assert reason_text("") == "no reason"


def test_a_reason_names_what_breaks():
    text = "Dynamic shape operator\n  Hint: ..\n\n  Developer debug context: {}\n"
    named = text.format("aten._ctc_loss.Tensor")
    assert reason_text(named) == "Dynamic shape operator: aten._ctc_loss.Tensor"
    assert reason_text(
        text.format("call_function args: " + 9 * "TensorVariable() ")
    ) == ("Dynamic shape operator")


def test_a_recurrent_layer_may_stay_in_the_graph():
    assert "allow_rnn = True" in way_out(
        "Hint: Set torch._dynamo.config.allow_rnn=True"
    )


def test_other_breaks_are_to_be_removed():
    assert way_out("print") == REMOVE_IT


def test_what_follows_in_callers_may_stay_in_one_graph():
    assert way_out("print", [USER]) == REMOVE_IT
    assert way_out("print", [USER, LIBRARY]) == f"{REMOVE_IT}, or {NESTED}"
    with torch._dynamo.config.patch(nested_graph_breaks=True):
        assert way_out("print", [USER, LIBRARY]) == REMOVE_IT
