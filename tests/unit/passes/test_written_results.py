"""Results of a compiled program may be written to, as trainers do to the loss."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.golden.capture import fake_mesh


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x):
        y = self.project(x)
        y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
        return y, y.sum()


@pytest.fixture
def results():
    """On rank 1 of a group that exchanges nothing."""
    with fake_mesh(2) as mesh:
        options = {"mesh": mesh, "shard": {"x": 2}, "inner": "aot_eager"}
        compiled = torch.compile(Attention(), backend="cp", options=options)
        yield compiled(torch.randn(1, 2, 8, 4))


@pytest.mark.parametrize("which", [0, 1])
def test_what_a_program_made_is_written_to(results, which):
    made = results[which]
    assert made.requires_grad and not made._is_view()
    made += 1
    made.fill_(3.0)  # what a group that exchanges nothing gathers is anything
    assert bool((made == 3.0).all())
    made.sum().backward()
