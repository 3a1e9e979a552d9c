"""What hides the padding of a length that the ranks do not divide."""

import torch
import torch.nn.functional as F

from tests.golden.capture import capture, changes
from tests.golden.golden_text import assert_golden

MESH_AXES = {"cp": 4}

TABLE, WEIGHT = torch.randn(64, 8), torch.randn(8, 11)


def padded(mesh, fn, *inputs):
    """The passes over a program for many lengths, given one of them."""
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 1)
    names = fn.__code__.co_varnames[: len(inputs)]
    shard = dict.fromkeys(names, 1)
    return capture(fn, *inputs, mesh=mesh, shard=shard, dynamic=None)


def attend(x, **options):
    q = x.unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q, **options).squeeze(1)


def test_labels_and_positions(mesh):
    """Causal attention needs nothing."""

    def loss(x, labels):
        x = x + F.embedding(torch.arange(x.shape[1]), TABLE)
        logits = attend(x, is_causal=True) @ WEIGHT
        return F.cross_entropy(logits.mT, labels)

    found = padded(mesh, loss, torch.randn(2, 21, 8), torch.zeros(2, 21).long())
    assert found["pad_tokens"].rewrites == 2
    assert_golden(
        changes(found["pad_tokens"]),
        """\
+ arange_1 = arange(cp_padded_length, device=cpu)
+ lt = lt(arange_1, cp_real_length)
+ where = where(lt, arange, 0)
~ embedding: arange -> where
+ reshape = reshape(lt, [1, -1])
+ where_1 = where(reshape, l_labels_, -100)
~ cross_entropy: l_labels_ -> where_1""",
    )


def test_keys_and_averages(mesh):
    def loss(x):
        return attend(x).mean((1, 2))

    found = padded(mesh, loss, torch.randn(2, 21, 8))
    assert found["pad_tokens"].rewrites == 2
    (mask,) = found.ctx.findings.masks.values()
    assert mask.text == "key padding"
    assert_golden(
        changes(found["pad_tokens"]),
        """\
+ arange = arange(cp_padded_length, device=cpu)
+ lt = lt(arange, cp_real_length)
+ zeros_like = zeros_like(arange)
+ unsqueeze = unsqueeze(zeros_like, 0)
+ where = where(lt, unsqueeze, -1)
+ reshape = reshape(lt, [1, -1, 1])
+ where_1 = where(reshape, squeeze, 0)
+ mul = mul(cp_real_length, 8)
+ sum_1 = sum(where_1, [1, 2], dtype=torch.float32)
+ div = div(sum_1, mul)
~ return: mean -> div
- mean""",
    )


def test_a_length_that_the_ranks_divide_has_no_padding(mesh):
    def loss(x):
        return attend(x).mean((1, 2))

    found = padded(mesh, loss, torch.randn(2, 20, 8))
    assert not found["pad_tokens"].changed
