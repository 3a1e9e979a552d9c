"""cp::relayout in compiled graphs: what AOTAutograd sees, and the order of calls."""

import re

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import cpcompile as cp
from tests.golden.capture import fake_mesh
from tests.golden.golden_text import assert_golden
from tests.golden.ring_graphs import kept_graphs, text

_COMMUNICATION = re.compile(  # the call, and the layouts of a relayout
    r"torch\.ops\.((?:cp|_c10d_functional)\.(?!wait)\w+)\.default\("
    r"(?:.*('\w+', '\w+'), '\w+'\))?"
)


def there_and_back(x, group):
    """On 13 tokens: work in the zigzag layout."""
    y = torch.ops.cp.relayout(x * 2, 1, 13, "contiguous", "zigzag", group)
    return torch.ops.cp.relayout(y.sin(), 1, 13, "zigzag", "contiguous", group)


def traced(rank, as_dtensor):
    """The graphs of forward and backward that a compiler gets, on a rank of 4."""
    with fake_mesh(4, rank=rank) as mesh, kept_graphs() as (graphs, compiler):
        x = cp.shard(torch.ones(2, 13), mesh, 1)
        x = (x if as_dtensor else x.to_local()).requires_grad_()
        step = torch.compile(there_and_back, backend=compiler, fullgraph=True)
        step(x, mesh.get_group().group_name).sum().backward()
    return [text(graph) for graph in graphs]


@pytest.mark.parametrize(("rank", "as_dtensor"), [(0, False), (3, False), (1, True)])
def test_forward_and_backward(rank, as_dtensor):
    """Nothing is left of DTensors but their sizes, which are results to be saved."""
    code = "\n---\n".join(traced(rank, as_dtensor))
    assert (", primals_2" in code) == as_dtensor
    code = code.replace(", primals_2", "")
    code = code.replace(" dim=1, length=13,", "").replace(", group=GROUP", "")
    assert_golden(
        code.replace("(mul_2)", "(mul_2,)"),
        """\
mul = aten.mul.Tensor(primals_1, 2)
relayout = cp.relayout(mul, source='contiguous', target='zigzag')
sin = aten.sin(relayout)
relayout_1 = cp.relayout(sin, source='zigzag', target='contiguous')
return (relayout_1, relayout)
---
relayout_2 = cp.relayout(tangents_1, source='contiguous', target='zigzag')
cos = aten.cos(relayout)
mul_1 = aten.mul.Tensor(relayout_2, cos)
relayout_3 = cp.relayout(mul_1, source='zigzag', target='contiguous')
mul_2 = aten.mul.Tensor(relayout_3, 2)
return (mul_2,)""",
    )


def layers(x, weights, group):
    """Two layers that work in another layout each."""
    length = x.shape[1]
    for w_in, w_out in weights:
        y = torch.ops.cp.relayout(x @ w_in, 1, length, "contiguous", "zigzag", group)
        y = torch.ops.cp.relayout(y.sin(), 1, length, "zigzag", "fold", group)
        x = x + torch.ops.cp.relayout(y @ w_out, 1, length, "fold", "contiguous", group)
    return x.square().sum()


def communication(rank, fn, *args, **settings):
    """Per module that Inductor generates for `fn`, the calls that communicate."""
    with fake_mesh(4, rank=rank) as mesh:
        options = {"mesh": mesh, "shard": {"x": 1}}
        step = torch.compile(fn, backend="cp", fullgraph=True, options=options)

        def run():
            out = step(torch.zeros(1, 37, 8), *args, mesh.get_group().group_name)
            if args:  # with weights
                out.backward()

        with inductor_config.patch({"fx_graph_cache": False} | settings):
            _, codes = run_and_get_code(run)
    return [_COMMUNICATION.findall(code) for code in codes]


def test_first_and_last_rank_agree():
    """Of 37 tokens the last rank has fewer, so that Inductor meets other sizes."""
    weights = torch.zeros(2, 2, 8, 8, requires_grad=True)
    first, last = (communication(rank, layers, weights) for rank in (0, 3))
    assert first == last
    forward, backward = ([name for name, _ in calls] for calls in first)
    assert forward.count("cp.relayout") == 6
    assert backward.count("cp.relayout") == 6
    assert "_c10d_functional.all_reduce_" in backward


def branches(x, group):
    """A large message first, and two small ones, of which one waits for the other."""
    length = x.shape[1]
    large = torch.ops.cp.relayout(
        x.repeat(1, 1, 8), 1, length, "contiguous", "zigzag", group
    )
    small = torch.ops.cp.relayout(x, 1, length, "contiguous", "striped", group)
    small = torch.ops.cp.relayout(small.sin(), 1, length, "striped", "fold", group)
    return small, large.sum()


def test_memory_does_not_change_the_order():
    """What an order costs in memory is not the same on ranks of other sizes."""
    by_memory, by_graph = (
        communication(0, branches, reorder_for_peak_memory=setting)
        for setting in (True, False)
    )
    assert by_memory == by_graph
    (calls,) = by_graph
    assert [name for name, _ in calls].count("cp.relayout") == 3


@pytest.mark.parametrize("as_dtensor", [True, False])
def test_one_program_for_many_lengths(mesh, as_dtensor):
    def there(x, length, group):
        return torch.ops.cp.relayout(x.sin(), 1, length, "contiguous", "fold", group)

    options: dict = {"backend": "aot_eager"}
    if as_dtensor:
        options = {"backend": "cp", "options": {"inner": "aot_eager"}}
    step = torch.compile(there, fullgraph=True, dynamic=True, **options)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (32, 40, 48):
            x = cp.shard(torch.zeros(2, length, 3), mesh, 1)
            x = (x if as_dtensor else x.to_local()).requires_grad_()
            out = step(x, length, mesh.get_group().group_name)
            out.sum().backward()
            assert x.grad.shape == x.shape
