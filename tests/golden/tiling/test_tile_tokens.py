"""The joint graph before and after `tile_tokens`."""

import torch

from tests.golden.golden_text import assert_golden, lines_with, renumbered
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
    before, after = graphs(plain)
    assert_golden(
        lines_with(before, "160"),
        """\
t = t(primals_4,)  # [8, 160]
mm = mm(view, t)  # [192, 160]
_unsafe_view = _unsafe_view(mm, [1, 192, 160])  # [1, 192, 160]
view_1 = view(_unsafe_view, [192, 160])  # [192, 160]
_log_softmax = _log_softmax(view_1, 1, False)  # [192, 160]
detach = detach(_log_softmax,)  # [192, 160]
nll_loss_backward = nll_loss_backward(tangents_1, _log_softmax, view_2, None, 1, -100,
    getitem_4)  # [192, 160]
detach_1 = detach(detach,)  # [192, 160]
_log_softmax_backward_data = _log_softmax_backward_data(nll_loss_backward, detach_1, 1,
    torch.float32)  # [192, 160]
view_3 = view(_log_softmax_backward_data, [1, 192, 160])  # [1, 192, 160]
view_4 = view(view_3, [192, 160])  # [192, 160]
t_1 = t(view_4,)  # [160, 192]
mm_1 = mm(t_1, view)  # [160, 8]
t_2 = t(mm_1,)  # [8, 160]
t_3 = t(t,)  # [160, 8]
t_4 = t(t_2,)  # [160, 8]""",
    )
    assert_golden(
        renumbered(
            lines_with(text(after.graph), "160]", "invoke", "mul_tensor"),
            "scalar_tensor",
        ),
        """\
t = t(primals_4,)  # [8, 160]
invoke_subgraph = invoke_subgraph(tile_0_0, 'cp_tile_0_0', slice_tensor, t,
    slice_tensor_1, slice_tensor_2, slice_tensor_3, scalar_tensor, t_3, full_default)
getitem_8 = getitem(invoke_subgraph, 0)  # [96, 1]
getitem_9 = getitem(invoke_subgraph, 1)  # [96, 8]
getitem_10 = getitem(invoke_subgraph, 2)  # [96, 160]
reshape_default = reshape(getitem_10, [1, 96, 160])  # [1, 96, 160]
reshape_default_1 = reshape(reshape_default, [96, 160])  # [96, 160]
invoke_subgraph_1 = invoke_subgraph(tile_0_0, 'cp_tile_0_0', slice_tensor_4, t,
    slice_tensor_5, slice_tensor_6, slice_tensor_7, scalar_tensor, t_3, select_int_1)
getitem_11 = getitem(invoke_subgraph_1, 0)  # [96, 1]
getitem_12 = getitem(invoke_subgraph_1, 1)  # [96, 8]
mul_tensor_1 = mul(cat_default_1, div_1)  # [192, 8]
getitem_13 = getitem(invoke_subgraph_1, 2)  # [96, 160]
reshape_default_2 = reshape(getitem_13, [1, 96, 160])  # [1, 96, 160]
reshape_default_3 = reshape(reshape_default_2, [96, 160])  # [96, 160]
mul_tensor = mul(getitem_14, div_1)  # [160, 8]
t_2 = t(mul_tensor,)  # [8, 160]
view_5 = view(mul_tensor_1, [1, 192, 8])  # [1, 192, 8]""",
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
    before, after = graphs(gated_mlp)
    assert_golden(
        renumbered(lines_with(before, "64]"), "view"),
        """\
t = t(primals_4,)  # [8, 64]
mm = mm(view, t)  # [192, 64]
view_1 = view(mm, [1, 192, 64])  # [1, 192, 64]
silu = silu(view_1,)  # [1, 192, 64]
t_1 = t(primals_5,)  # [8, 64]
addmm = addmm(primals_6, view_2, t_1)  # [192, 64]
view_3 = view(addmm, [1, 192, 64])  # [1, 192, 64]
mul = mul(silu, view_3)  # [1, 192, 64]
view_4 = view(mul, [192, 64])  # [192, 64]
t_3 = t(t_2,)  # [8, 64]
mm_1 = mm(view_5, t_3)  # [192, 64]
mm_2 = mm(t_4, view_4)  # [8, 64]
t_6 = t(t_5,)  # [8, 64]
view_6 = view(mm_1, [1, 192, 64])  # [1, 192, 64]
mul_3 = mul(view_6, silu)  # [1, 192, 64]
mul_4 = mul(view_6, view_3)  # [1, 192, 64]
view_7 = view(mul_3, [192, 64])  # [192, 64]
t_9 = t(mm_4,)  # [8, 64]
sum_3 = sum(view_7, [0], True)  # [1, 64]
view_8 = view(sum_3, [64])  # [64]
silu_backward = silu_backward(mul_4, view_1)  # [1, 192, 64]
view_9 = view(silu_backward, [192, 64])  # [192, 64]
t_12 = t(mm_5,)  # [8, 64]""",
    )
    assert_golden(
        lines_with(text(after.graph), "invoke"),
        """\
invoke_subgraph = invoke_subgraph(tile_0_0, 'cp_tile_0_0', slice_tensor, t, primals_6,
    slice_tensor, t_1, primals_8, t_2)
getitem_6 = getitem(invoke_subgraph, 0)  # [96, 8]
invoke_subgraph_1 = invoke_subgraph(tile_0_0, 'cp_tile_0_0', slice_tensor_2, t,
    primals_6, slice_tensor_2, t_1, primals_8, t_2)
getitem_7 = getitem(invoke_subgraph_1, 0)  # [96, 8]
invoke_subgraph_2 = invoke_subgraph(tile_0_1, 'cp_tile_0_1', slice_tensor, t, primals_6,
    slice_tensor, t_1, slice_tensor_6, t_3, slice_tensor_7, t_7, t_13, full_default,
    full_default_1, full_default_1, full_default_1)
getitem_8 = getitem(invoke_subgraph_2, 0)  # [96, 8]
getitem_9 = getitem(invoke_subgraph_2, 1)  # [96, 8]
getitem_10 = getitem(invoke_subgraph_2, 2)  # [1, 64]
getitem_11 = getitem(invoke_subgraph_2, 3)  # [1, 96, 64]
getitem_12 = getitem(invoke_subgraph_2, 4)  # [1, 96, 64]
getitem_13 = getitem(invoke_subgraph_2, 5)  # [1, 96, 64]
invoke_subgraph_3 = invoke_subgraph(tile_0_1, 'cp_tile_0_1', slice_tensor_2, t,
    primals_6, slice_tensor_2, t_1, slice_tensor_10, t_3, slice_tensor_11, t_7, t_13,
    getitem_10, select_int_1, select_int_3, select_int_5)
getitem_14 = getitem(invoke_subgraph_3, 0)  # [96, 8]
getitem_15 = getitem(invoke_subgraph_3, 1)  # [96, 8]
getitem_16 = getitem(invoke_subgraph_3, 2)  # [1, 64]
getitem_17 = getitem(invoke_subgraph_3, 3)  # [1, 96, 64]
getitem_18 = getitem(invoke_subgraph_3, 4)  # [1, 96, 64]
getitem_19 = getitem(invoke_subgraph_3, 5)  # [1, 96, 64]""",
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
