"""What is known of the Python frame that Dynamo compiles."""

import torch
import torch.nn as nn

from cpcompile.frontend.arguments import Frame


class Model(nn.Module):
    def forward(self, tokens, labels=None):
        return tokens


def test_frames_know_the_names_after_args():
    """What Dynamo compiles may be nn.Module's own _call_impl(self, *args)."""
    model, x = Model(), torch.randn(2, 16)
    frame = Frame("_call_impl", {"self": model, "args": (x,), "kwargs": {"labels": x}})
    names = frame.argument_names()
    assert names["tokens"] is x
    assert names["labels"] is x
    assert frame.positional_name(1) == "labels"
    assert frame.positional_name(2) is None


def test_frames_after_a_graph_break():
    assert Frame("torch_dynamo_resume_in_forward_at_12", {}).is_part
    assert not Frame("forward", {}).is_part


def test_no_frame_outside_of_a_compilation():
    frame = Frame.current()
    assert (frame.name, frame.values) == ("<graph>", {})
