"""The joint graph before and after `tile_tokens`."""

import re

import torch

from tests.golden.golden_text import assert_golden, lines_with
from tests.support.forms.tiled_forms import along_tokens, example, gated_mlp, plain
from tests.support.joint_graphs import tiled


def graphs(form, tile=96, decomposed=False):
    model, x, labels = example(torch.float32)
    model.loss = form
    found = tiled(model, tile, decomposed)
    found.call(x[:1], labels[:1])
    (before,), (after,) = found.before, found.after
    return text(before), after


def text(graph):
    """One call a line, with the shape of what it gives."""
    lines = []
    for node in graph.nodes:
        value = node.meta.get("val")
        shape = f"  # {list(value.shape)}" if torch.is_tensor(value) else ""
        if node.op in ("call_function", "output"):
            target = getattr(
                node.target, "_opname", getattr(node.target, "__name__", "")
            )
            lines.append(f"{node.name} = {target}{node.args}{shape}")
    return "\n".join(lines)


def test_logits_and_loss():
    _, after = graphs(plain)
    calls = lines_with(text(after.graph), "invoke_subgraph(", "= cat(")
    assert_golden(
        re.sub(r"scalar_tensor_\d+", "scalar_tensor", calls),  # as torch numbers it
        """\
invoke_subgraph = invoke_subgraph(tile_0_0, 'cp_tile_0_0', slice_tensor, t,
    slice_tensor_1, slice_tensor_2, slice_tensor_3, scalar_tensor, t_3, full_default)
invoke_subgraph_1 = invoke_subgraph(tile_0_0, 'cp_tile_0_0', slice_tensor_4, t,
    slice_tensor_5, slice_tensor_6, slice_tensor_7, scalar_tensor, t_3, select_int_1)
cat_default = cat([getitem_8, getitem_11], 0)  # [192, 1]
cat_default_1 = cat([getitem_9, getitem_12], 0)  # [192, 8]""",
    )
    assert_golden(
        text(after.tile_0_0.graph),
        """\
full_default = full([], 1.0)  # []
mm_default = mm(operand_0, operand_1)  # [96, 160]
reshape_default = reshape(mm_default, [1, 96, 160])  # [1, 96, 160]
reshape_default_1 = reshape(reshape_default, [96, 160])  # [96, 160]
_log_softmax_default = _log_softmax(reshape_default_1, 1, False)  # [96, 160]
detach_default = detach(_log_softmax_default,)  # [96, 160]
gather_default = gather(_log_softmax_default, 1, operand_2)  # [96, 1]
full_like_default = full_like(_log_softmax_default, 0)  # [96, 160]
scatter_value = scatter(full_like_default, 1, operand_3, -1.0)  # [96, 160]
where_self = where(operand_4, full_default, operand_5)  # [96, 1]
mul_tensor = mul(scatter_value, where_self)  # [96, 160]
detach_default_1 = detach(detach_default,)  # [96, 160]
_log_softmax_backward_data_default = _log_softmax_backward_data(mul_tensor,
    detach_default_1, 1, torch.float32)  # [96, 160]
reshape_default_2 = reshape(_log_softmax_backward_data_default,
    [1, 96, 160])  # [1, 96, 160]
reshape_default_3 = reshape(reshape_default_2, [96, 160])  # [96, 160]
mm_default_1 = mm(reshape_default_3, operand_6)  # [96, 8]
output = ((gather_default, mm_default_1, _log_softmax_backward_data_default),)""",
    )


def test_an_mlp():
    """The backward is in tiles of its own, which sum the gradients of weights."""
    _, after = graphs(gated_mlp)
    assert_golden(
        lines_with(text(after.graph), "invoke_subgraph("),
        """\
invoke_subgraph = invoke_subgraph(tile_0_0, 'cp_tile_0_0', slice_tensor, t, primals_6,
    slice_tensor, t_1, primals_8, t_2)
invoke_subgraph_1 = invoke_subgraph(tile_0_0, 'cp_tile_0_0', slice_tensor_2, t,
    primals_6, slice_tensor_2, t_1, primals_8, t_2)
invoke_subgraph_2 = invoke_subgraph(tile_0_1, 'cp_tile_0_1', slice_tensor, t, primals_6,
    slice_tensor, t_1, slice_tensor_6, t_3, slice_tensor_7, t_7, t_13, full_default,
    full_default_1, full_default_1, full_default_1)
invoke_subgraph_3 = invoke_subgraph(tile_0_1, 'cp_tile_0_1', slice_tensor_2, t,
    primals_6, slice_tensor_2, t_1, slice_tensor_10, t_3, slice_tensor_11, t_7, t_13,
    getitem_10, select_int_1, select_int_3, select_int_5)""",
    )
    assert_golden(
        text(after.tile_0_0.graph),
        """\
mm_default = mm(operand_0, operand_1)  # [96, 64]
reshape_default = reshape(mm_default, [1, 96, 64])  # [1, 96, 64]
silu_default = silu(reshape_default,)  # [1, 96, 64]
addmm_default = addmm(operand_2, operand_3, operand_4)  # [96, 64]
reshape_default_1 = reshape(addmm_default, [1, 96, 64])  # [1, 96, 64]
mul_tensor = mul(silu_default, reshape_default_1)  # [1, 96, 64]
reshape_default_2 = reshape(mul_tensor, [96, 64])  # [96, 64]
addmm_default_1 = addmm(operand_5, reshape_default_2, operand_6)  # [96, 8]
output = ((addmm_default_1,),)""",
    )


def test_what_mixes_tokens_stays():
    before, after = graphs(along_tokens)
    names = [n for n, _ in after.named_children()]
    cut = [text(getattr(after, n).graph) for n in names]
    assert not lines_with("\n".join(cut), "cumsum")
    left = lines_with(text(after.graph), "= cumsum").count("\n")
    assert left == lines_with(before, "= cumsum").count("\n")
