"""The joint graph after `tile_tokens`."""

import re

import pytest
import torch
import torch.nn.functional as F

from tests.golden.golden_text import assert_golden, lines_with
from tests.golden.operands import attend
from tests.support.forms.tiled_forms import example, gated_mlp, plain
from tests.support.joint_graphs import tiled


def after(form):
    """The graph of 192 tokens in two tiles."""
    model, x, labels = example(torch.float32)
    model.loss = form
    found = tiled(model, 96, False)
    found.call(x[:1], labels[:1])
    (module,) = found.after
    return text(module.graph)


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
    """No call outside of the tiles has logits, of 160 words."""
    graph = after(plain)
    assert "192, 160]" not in graph
    calls = lines_with(graph, "invoke_subgraph(", "= cat(")
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


def test_an_mlp():
    """The backward is in tiles of its own, which sum the gradients of weights."""
    assert_golden(
        lines_with(after(gated_mlp), "invoke_subgraph("),
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


@pytest.mark.parametrize("mesh", [2], indirect=True)
def test_what_is_viewed_lies_in_memory_as_without_tiles(mesh):
    table = torch.randn(2, 10240, 32, requires_grad=True)
    conv = torch.nn.Conv2d(3, 32, 4, 4)

    def embedded(image):
        x, rows = conv(image).flatten(2).mT, torch.arange(576)
        places = torch.stack([rows % 24, rows // 24], -1).expand(len(x), -1, -1)
        known = F.one_hot(places, 10240).permute(0, 2, 1, 3).to(x)  # as in Gemma 4
        return attend(x + (known @ table).sum(1))

    given = {"mesh": mesh, "inner": "aot_eager"}
    step = torch.compile(embedded, backend="cp", options=given)
    step(torch.randn(2, 3, 96, 96)).sum().backward()
