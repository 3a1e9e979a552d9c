"""What the passes write before the joint graph of the sequence is that of one rank."""

from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import cpcompile as cp
from cpcompile.compile import inner_compilers
from cpcompile.passes.pipeline import WHOLE
from tests.cpu.routed_models import ROUTED
from tests.golden.capture import Step, capture_pass, changes, localised, warnings
from tests.golden.golden_text import assert_golden, golden_text, table
from tests.golden.laid_out import attend
from tests.support.mixers import LinearAttention

MESH_AXES = {"cp": 4}
SHARD = {"x": 1}


def step_of(name, fn, mesh):
    """What a pass changes in the joint graph of fn(x), x [2, 12, 8]."""
    steps, run_passes = {}, inner_compilers.run_passes

    def one_by_one(gm, passes, ctx):
        for run in passes if passes is WHOLE else ():
            before = golden_text(gm.graph)
            (done,) = run_passes(gm, (run,), ctx)
            after = golden_text(gm.graph)
            steps[run.__name__] = Step(done.rewrites, before, after, before != after)

    with mock.patch.object(inner_compilers, "run_passes", one_by_one):
        localised(fn, torch.randn(2, 12, 8), mesh=mesh, shard=SHARD)
    return steps[name]


def test_convolutions(mesh):
    """The zeros in front are no tokens that a rank would have to move."""
    conv = nn.Conv1d(8, 8, 4, groups=8, bias=False)
    step = step_of("keep_convolutions", lambda x: conv(F.pad(x.mT, (3, 0))).sin(), mesh)
    assert step.rewrites == 2
    assert_golden(
        changes(step),
        """\
+ window_convolution_default = cp_whole.window_convolution(transpose, primals_2,
    stride=[1], before=[3], counts=[12], dilation=[1], groups=8)
~ sin: convolution -> window_convolution_default
~ cos: convolution -> window_convolution_default
+ window_convolution_backward_default = cp_whole.window_convolution_backward(mul,
    transpose, primals_2, stride=[1], before=[3], dilation=[1], groups=8,
    needed=[False, True, False])
~ return: return[sin, None, convolution_backward[1]] -> return[sin, None,
    window_convolution_backward_default[1]]
- aten.constant_pad_nd, aten.convolution, aten.convolution_backward""",
    )


def test_rows_of_heads(mesh):
    weight = nn.Parameter(torch.ones(4))

    def norm_of_heads(x):
        return (x.reshape(-1, 4).softmax(-1) * weight).view(2, 12, 8)

    step = step_of("keep_rows", norm_of_heads, mesh)
    assert_golden(
        changes(step),
        """\
+ reshape_default = aten.reshape(primals_1, shape=[2, 12, 2, 4])
+ _softmax_default = aten._softmax(reshape_default, dim=3, half_to_float=False)
+ mul_tensor = aten.mul.Tensor(_softmax_default, primals_2)
+ reshape_default_1 = aten.reshape(tangents_1, shape=[2, 12, 2, 4])
+ mul_tensor_1 = aten.mul.Tensor(reshape_default_1, _softmax_default)
+ sum_dim_int_list = aten.sum.dim_IntList(mul_tensor_1, dim=[0, 1, 2])
~ return: return[mul, None, sum_1] -> return[mul_tensor, None, sum_dim_int_list]
- aten._softmax, aten.mul.Tensor, aten.mul.Tensor, aten.sum.dim_IntList""",
    )


def cut_logits(of_logits):
    scale, head = nn.Parameter(torch.ones(8)), nn.Linear(8, 32, bias=False)
    return lambda x: of_logits(head(x * scale)).logsumexp(-1).sum()


def test_cut_logits(mesh):
    """Narrow tokens are cut, and the gradient of narrow tokens is filled up."""
    step = step_of("cut_early", cut_logits(lambda y: (y / 2)[:, :-1]), mesh)
    assert step.rewrites == 2
    assert_golden(
        changes(step),
        """\
+ slice_tensor = aten.slice.Tensor(mul, dim=1, start=0, end=-1)
+ product_default_5 = cp_whole.product(slice_tensor, primals_3, equation='abc,dc->abd')
+ div_tensor_1 = aten.div.Tensor(product_default_5, 2)
~ logsumexp: slice_1 -> div_tensor_1
~ sub: slice_1 -> div_tensor_1
+ div_tensor = aten.div.Tensor(mul_1, 2)
+ product_default_3 = cp_whole.product(div_tensor, slice_tensor, equation='bca,bcd->ad')
~ t_2: product_default_1 -> product_default_3
+ product_default_4 = cp_whole.product(div_tensor, primals_3, equation='abc,cd->abd')
+ slice_backward_default = aten.slice_backward(product_default_4,
    input_sizes=[2, 12, 8], dim=1, start=0, end=-1, step=1)
~ mul_2: product_default_2 -> slice_backward_default
- cp_whole.product, aten._unsafe_view, aten.div.Tensor, aten.slice.Tensor,
    aten.slice_backward, aten.div.Tensor, cp_whole.product, cp_whole.product""",
    )


LEFT = [
    lambda y: torch.cat((y[:, :-1], y[:, -1:]), 1),  # all of them are read
    lambda y: y[:, ::2],  # with steps
    lambda y: y.cumsum(1)[:, :-1],  # tokens meet before they are cut
    lambda y: y.tanh()[:, :-1],  # what the backward reads is wide
]


@pytest.mark.parametrize("of_logits", LEFT)
def test_logits_that_are_not_cut_early(mesh, of_logits):
    assert step_of("cut_early", cut_logits(of_logits), mesh).rewrites == 0


def test_products(mesh):
    """Of the forward, and of the gradient of the weight."""
    linear = nn.Linear(8, 16)
    step = step_of("keep_products", lambda x: linear(x).sin(), mesh)
    assert step.rewrites == 2
    assert_golden(
        changes(step),
        """\
+ product_default = cp_whole.product(primals_3, primals_1, equation='abc,dc->abd')
+ add_tensor_1 = aten.add.Tensor(product_default, primals_2)
~ sin: addmm -> add_tensor_1
~ cos: addmm -> add_tensor_1
+ product_default_1 = cp_whole.product(mul, primals_3, equation='bca,bcd->ad')
~ t_2: mm -> product_default_1
- aten.t, aten.addmm, aten.t, aten.mm""",
    )


def test_the_gradient_of_a_sum_of_a_product(mesh, caplog):
    """It is the same for all tokens, of which the ranks only add up theirs."""
    linear, x = nn.Linear(8, 8), torch.randn(2, 12, 8)
    text = localised(lambda x: linear(x).sum(), x, mesh=mesh, shard=SHARD).text
    assert "all_gather" not in text and warnings(caplog) == []


class Patches(nn.Module):
    """Tokens that a convolution makes of an image, with attention between them."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)

    def forward(self, image):
        return attend(self.patches(image).flatten(2).mT)


def test_tokens_begin_where_no_input_has_them(mesh):
    step = capture_pass("begin_tokens", Patches(), torch.randn(2, 3, 8, 8), mesh=mesh)
    assert_golden(
        changes(step),
        """\
+ split_along_default = cp_whole.split_along(flatten, source=-1, target=2)
~ mT: flatten -> split_along_default""",
    )


def test_programs_of_rows(mesh):
    ids = torch.zeros(2, 16, dtype=torch.long)
    shard = {"tokens": 1}
    step = capture_pass("keep_calls", ROUTED["Routed"](), ids, mesh=mesh, shard=shard)
    assert_golden(
        changes(step),
        """\
+ in_memory_order = in_memory_order(ring_attention_default[0], (0, 2, 1, 3))
~ transpose_1: ring_attention_default[0] -> in_memory_order
+ cp_row_parallel = run_kept(moe_dispatch, topk[1], flat, topk[0],
    l_self_parameters_up_, l_self_parameters_down_, l_self_parameters_bias_)
+ cp_row_parallel_1 = run_kept(moe_dispatch, topk[1])
- cp_row_parallel, cp_row_parallel""",
    )


def test_marks_and_the_order_in_memory(mesh):
    """Marks are no calls; on one device attention has another order in memory."""
    wide, narrow = torch.zeros(1, 1, 1).expand(1, 4096, 512), torch.randn(2, 16, 8)
    options = {"mesh": mesh, "shard": SHARD, "strategy": "auto"}
    steps = {
        "exchanged": capture_pass("keep_calls", LinearAttention(512), wide, **options),
        "attention": capture_pass("keep_calls", attend, narrow, **options),
    }
    assert_golden(
        table({name: changes(step) for name, step in steps.items()}),
        """\
exchanged:
  + constraint = cp_whole.split_along(q_2, source=1, target=2)
  + constraint_1 = cp_whole.split_along(k_2, source=1, target=2)
  + constraint_2 = cp_whole.split_along(unsqueeze_1, source=1, target=2)
  + constraint_3 = cp_whole.split_along(truediv, source=2, target=1)
  - constraint, constraint, constraint, constraint
attention:
  + constraint = cp_whole.latent_keys(q, step='gather')
  + constraint_1 = cp_whole.latent_keys(constraint, step='keys')
  + constraint_2 = cp_whole.latent_keys(constraint, step='keys')
  + in_memory_order = in_memory_order(all_gather_attention_default[0], (0, 2, 1, 3))
  ~ transpose_1: all_gather_attention_default[0] -> in_memory_order
  - constraint, constraint, constraint""",
    )


def test_wide_results_are_made_later(mesh):
    """What leaves in their place is narrow, and the loss can run in tiles."""
    head = nn.Linear(8, 64, bias=False)

    def loss(x):
        logits = head(attend(x))
        return logits, logits.logsumexp(-1).mean()

    x = cp.shard(torch.randn(2, 16, 8), mesh, 1).requires_grad_()
    options = {"tile": 4, "tile_least_megabytes": 1e-6}
    step = capture_pass("leave_for_later", loss, x, **options)
    assert_golden(
        changes(step),
        """\
~ return: logits -> flatten""",
    )
