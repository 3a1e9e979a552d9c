"""A model whose calls ranks compare, and what they raise."""

import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from cpcompile import config
from tests.cpu.attention_cases import compiled_on

# Seconds in which a difference has to be known, on a busy machine too; a message of the
# group would be waited for 60 s.
SOON_SECONDS = 30.0


class Model(nn.Module):
    """A float sequence, a buffer, and perhaps a mask."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("gain", torch.ones(8))

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x * self.gain).unsqueeze(1).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.dropout(y).pow(2).mean()


def compiled(model, ranks=2, check_ranks="auto", **options):
    """The model, which is called under the setting, and its float input."""
    torch._dynamo.reset()
    step = compiled_on(ranks, model, **options)

    def call(*args):
        with config.patch(check_ranks=check_ranks):
            return step(*args)

    return call, torch.randn(1, 16, 8)


def error_of(act):
    """The text of the RankMismatchError that `act` raises, soon; "" if none."""
    start = time.monotonic()
    try:
        act()
    except Exception as error:  # while it compiles it is torch's BackendCompilerFailed
        if "RankMismatchError" not in f"{type(error).__name__}: {error}":
            raise
        assert time.monotonic() - start < SOON_SECONDS
        return str(error)
    return ""
