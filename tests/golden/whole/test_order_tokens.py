"""The order in which calls of the joint graph see tokens, forward and backward."""

import re

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.golden.capture import localised
from tests.golden.laid_out import attend

MESH_AXES = {"cp": 4}


class Blocks(nn.Module):
    """Two blocks with `middle` between them, and a loss."""

    def __init__(self, middle=lambda x: x):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(16, 8), nn.Linear(8, 8, bias=False)
        self.middle = middle

    def block(self, x):
        x = x + attend(self.linear(F.rms_norm(x, (8,))))
        return x + self.linear(F.rms_norm(x, (8,))).relu()

    def forward(self, ids, labels):
        x = self.block(self.middle(self.block(self.embedding(ids))))
        logits = x @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def local(mesh, **options):
    ids = torch.zeros(2, 32, dtype=torch.long)
    options |= {"mesh": mesh, "shard": {"ids": 1, "labels": 1}}
    return localised(Blocks(**options.pop("model", {})), ids, ids + 1, **options)


def calls(found, *names):
    """The calls of these names, else all of cpcompile and collectives, in order."""
    pattern = "|".join(names) or r"(?!wait)\w+"
    kinds = r"\w+" if names else "(?:cp|_c10d_functional)"
    return re.findall(rf" = {kinds}\.({pattern})\(", found.text)


def test_ids_are_laid_out_and_nothing_is_between_the_blocks(mesh):
    """Nor in the backward: ranks cut ids and labels in the order of attention."""
    found = local(mesh, strategy="ring", layout="zigzag")
    assert [call.form for call in found.report.calls] == ["ring zigzag"] * 2
    assert (found.report.relayouts_left, found.report.relayouts_cancelled) == (0, 8)
    ring = ["ring_attention"] * 2 + ["ring_attention_backward"] * 2
    assert calls(found) == ring + ["all_reduce"] * 3
    assert found.text.count("spec='causal zigzag scale=0.5'") == 4


def test_a_call_whose_tokens_meet_has_them_in_order(mesh):
    """Its result is whole, and cut in the order of the next block."""
    middle = {"middle": lambda x: x.cumsum(1)}
    found = local(mesh, strategy="ring", layout="zigzag", model=middle)
    assert (found.report.relayouts_left, found.report.relayouts_cancelled) == (1, 7)
    meet = ["relayout", "all_gather_into_tensor", "cumsum"]
    assert calls(found, *meet) == 2 * meet
