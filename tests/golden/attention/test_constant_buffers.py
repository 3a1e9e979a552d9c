"""What the graph looks like when the value of a buffer has become a part of it."""

import pytest
import torch
import torch.nn.functional as F

from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden, table
from tests.support.constant_masks import (
    READ,
    STAYS,
    Attribute,
    Item,
    Masked,
    token_ids,
)


def traced(model, *inputs, mesh):
    captured = capture(model, token_ids(), *inputs, mesh=mesh)
    assert captured.error is None
    return captured


def test_what_buffers_say(mesh):
    """A bias is cut from the buffer."""
    values = {"causal": READ["numbers"], "window": READ["window"]}
    values["a bias"] = STAYS["holes"]
    texts = {
        name: traced(Masked(value), mesh=mesh).lines("unsqueeze_1 =", "cp.ring")
        for name, (value, *_) in values.items()
    }
    assert_golden(
        table(texts),
        """\
causal: ring_attention_default = cp.ring_attention(q, k, v, sizes=[24, 24],
    spec='causal scale=0.353553', group=GROUP)
window: ring_attention_default = cp.ring_attention(q, k, v, [cp_constant],
    sizes=[24, 24], spec='scale=0.353553 mask_key=d828ec7ab67f5c7b +key_ranges',
    group=GROUP)
a bias:
  unsqueeze_1 = unsqueeze(unsqueeze, 0)  # [1, 1, 24, 24]
  ring_attention_default = cp.ring_attention(q, k, v, [unsqueeze_1], sizes=[24, 24],
      spec='scale=0.353553 mask_key=b681bc18c3d57afd +bias', group=GROUP)""",
    )


@pytest.mark.parametrize("kind", [Attribute, Item])
def test_a_tensor_that_the_module_holds(mesh, kind):
    captured = traced(kind(READ["numbers"][0]), mesh=mesh)
    assert [call.is_causal for call in captured.ctx.findings.calls] == [True]
    (read,) = [
        captured.ctx.buffers[x].name for x in captured.ctx.findings.read_by_value
    ]
    assert read == "attribute " + ("attn_mask" if kind is Attribute else "kept.mask.0")


def test_what_the_caller_passes_stays_a_bias(mesh):
    """The twin: another argument may come with every call."""
    mask = READ["numbers"][0]

    def attend(tokens, given):
        return F.scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=given)

    q = torch.randn(2, 2, 40, 8)
    captured = capture(attend, q, mask, mesh=mesh, shard={"tokens": 2})
    assert not captured.ctx.findings.read_by_value
    assert "+bias" in captured.lines("cp.ring_attention")
