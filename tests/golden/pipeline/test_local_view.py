"""Graphs in the local view: nothing is moved between the layout and the results."""

import torch
import torch.nn as nn

import cpcompile as cp
from cpcompile.frontend.local_view import local_cp
from cpcompile.geometry.layout import Layout
from cpcompile.ranks.layout_marks import layout_of
from tests.golden.capture import forget
from tests.golden.golden_text import assert_golden, lines_with, table
from tests.golden.laid_out import attend
from tests.golden.ring_graphs import kept_graphs, text

LOCAL, GLOBAL = {"backend": local_cp}, {"backend": "cp"}
VIEWS = {"local": LOCAL, "global": GLOBAL}


def block(x):
    """Token-wise calls around attention, x [2, 32, 8]."""
    return x + attend(x * 2)


def entering(mesh, layout):
    return cp.shard(torch.randn(2, 32, 8), mesh, 1, layout=layout)


def compiled(fn, *inputs, backend, **options):
    """The result of fn, and the texts of the graphs of forward and backward."""
    forget()
    options |= {"inner": "aot_eager", "strategy": "ring", "layout": "auto"}
    with kept_graphs() as (graphs, _):
        step = torch.compile(fn, backend=backend, fullgraph=True, options=options)
        result = step(*inputs)
        if result.requires_grad:
            result.to_local().sum().backward()
    return result, [*map(text, graphs)]


def test_results_stay_in_the_layout_of_the_batch(mesh):
    """In the global view they are in order."""
    x, texts, layouts = entering(mesh, "zigzag"), {}, []
    for name, view in VIEWS.items():
        result, (code,) = compiled(block, x, **view)
        texts[name] = lines_with(code, " = cp.", "return")
        layouts.append(layout_of(result))
    assert layouts == [Layout.ZIGZAG, Layout.CONTIGUOUS]
    assert_golden(
        table(texts),
        """\
local:
  ring_attention_2 = cp.ring_attention(transpose_4, transpose_4, transpose_4,
      sizes=[32, 32], spec='causal zigzag scale=0.5', group=GROUP)
  return (add_2,)
global:
  ring_attention_2 = cp.ring_attention(transpose_4, transpose_4, transpose_4,
      sizes=[32, 32], spec='causal zigzag scale=0.5', group=GROUP)
  relayout = cp.relayout(add_2, dim=1, length=32, source='zigzag', target='contiguous',
      group=GROUP)
  return (relayout,)""",
    )


class Scaled(nn.Module):
    """A parameter, and an activation that is the same on every rank."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x, bias):
        return attend(x * self.scale + bias)


def test_which_gradients_leave(mesh):
    """Of a parameter and an activation: shares, sums, and the share times 8."""
    how = {**VIEWS, "average": GLOBAL | {"grad_sync": "average"}}
    texts, x = {}, entering(mesh, "contiguous")
    for name, options in how.items():
        bias = torch.ones(8, requires_grad=True) * 1
        _, (_, code) = compiled(Scaled(), x, bias, **options)
        texts[name] = lines_with(code, "all_reduce(", ", 1)", ", 8)", "return")
    assert_golden(
        table(texts),
        """\
local:
  mul_8 = aten.mul.Tensor(sum_6, 1)
  mul_9 = aten.mul.Tensor(sum_5, 1)
  return (mul_8, None, mul_9)
global:
  all_reduce_2 = _c10d_functional.all_reduce(sum_6, reduce_op='sum', group_name='0')
  all_reduce_3 = _c10d_functional.all_reduce(sum_5, reduce_op='sum', group_name='0')
  return (wait_tensor_2, None, wait_tensor_3)
average:
  mul_7 = aten.mul.Tensor(sum_6, 8)
  all_reduce_1 = _c10d_functional.all_reduce(sum_5, reduce_op='sum', group_name='0')
  return (mul_7, None, wait_tensor_1)""",
    )
