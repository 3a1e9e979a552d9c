"""The order in which calls of the joint graph see tokens, forward and backward."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.golden.capture import localised
from tests.golden.golden_text import assert_golden
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


def test_ids_are_laid_out_and_nothing_is_between_the_blocks(mesh):
    """Nor in the backward: ranks cut ids and labels in the order of attention."""
    found = local(mesh, strategy="ring", layout="zigzag")
    assert [call.form for call in found.report.calls] == ["ring zigzag"] * 2
    assert (found.report.relayouts_left, found.report.relayouts_cancelled) == (0, 8)
    assert_golden(
        found.lines(" = cp.", "_c10d_functional.a"),
        """\
ring_attention_4 = cp.ring_attention(transpose_16, transpose_16, transpose_16,
    sizes=[32, 32], spec='causal zigzag scale=0.5', group='0')
ring_attention_5 = cp.ring_attention(transpose_18, transpose_18, transpose_18,
    sizes=[32, 32], spec='causal zigzag scale=0.5', group='0')
ring_attention_backward_4 = cp.ring_attention_backward(permute_42, transpose_18,
    transpose_18, transpose_18, getitem_50, getitem_51, sizes=[32, 32],
    spec='causal zigzag scale=0.5', group='0', bias_grad=False)
ring_attention_backward_5 = cp.ring_attention_backward(permute_46, transpose_16,
    transpose_16, transpose_16, getitem_48, getitem_49, sizes=[32, 32],
    spec='causal zigzag scale=0.5', group='0', bias_grad=False)
all_reduce_3 = _c10d_functional.all_reduce(div_24, reduce_op='sum', group_name='0')
all_reduce_4 = _c10d_functional.all_reduce(add_85, reduce_op='sum', group_name='0')
all_reduce_5 = _c10d_functional.all_reduce(add_82, reduce_op='sum', group_name='0')""",
    )


def test_a_call_whose_tokens_meet_has_them_in_order(mesh):
    """Its result is whole, and cut in the order of the next block."""
    middle = {"middle": lambda x: x.cumsum(1)}
    found = local(mesh, strategy="ring", layout="zigzag", model=middle)
    assert (found.report.relayouts_left, found.report.relayouts_cancelled) == (1, 7)
    assert_golden(
        found.lines("cp.relayout(", "gather_into_tensor(", "cumsum("),
        """\
relayout = cp.relayout(add_65, dim=1, length=32, source='zigzag', target='contiguous',
    group='0')
all_gather_into_tensor_2 = _c10d_functional.all_gather_into_tensor(relayout,
    group_size=4, group_name='0')
cumsum_4 = aten.cumsum(cat_2, dim=1)
relayout_1 = cp.relayout(add_83, dim=1, length=32, source='zigzag', target='contiguous',
    group='0')
all_gather_into_tensor_3 = _c10d_functional.all_gather_into_tensor(relayout_1,
    group_size=4, group_name='0')
cumsum_5 = aten.cumsum(flip_4, dim=1)""",
    )
