"""A model of one attention call, and the text of what is raised."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.cpu.attention_cases import sequence_mesh


class Model(nn.Module):
    """One attention call; `dropout_p` and `mask` are what the tests are about."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 32)
        self.dropout_p = 0.0

    def forward(self, tokens, mask=None):
        x = self.embedding(tokens)
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, q, q, attn_mask=mask, dropout_p=self.dropout_p, is_causal=mask is None
        )
        return y.transpose(1, 2).flatten(2).square().mean()


def compiled(model, **options):
    torch._dynamo.reset()
    given = {"mesh": sequence_mesh(2), "shard": {"tokens": 1}, "inner": "aot_eager"}
    return torch.compile(model, backend="cp", options=given | options)


def message_of(call) -> str:
    """The text of what `call` raises; every rank must get as far as this."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def tokens(seq: int = 16):
    return torch.arange(2 * seq).view(2, seq) % 50
