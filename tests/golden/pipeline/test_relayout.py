"""cp::relayout in compiled graphs: what AOTAutograd sees, and the order of calls."""

import re

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

import cpcompile as cp
from tests.golden.capture import fake_mesh

_COMMUNICATION = re.compile(  # the call, and the layouts of a relayout
    r"torch\.ops\.((?:cp|_c10d_functional)\.(?!wait)\w+)\.default\("
    r"(?:.*('\w+', '\w+'), '\w+'\))?"
)


def communication(fn, **settings):
    """The calls that communicate in the code that Inductor makes of fn(x, group)."""
    with fake_mesh(4, rank=0) as mesh:
        options = {"mesh": mesh, "shard": {"x": 1}}
        step = torch.compile(fn, backend="cp", fullgraph=True, options=options)
        x, group = torch.zeros(1, 37, 8), mesh.get_group().group_name
        with inductor_config.patch({"fx_graph_cache": False} | settings):
            _, (code,) = run_and_get_code(lambda: step(x, group))
    return _COMMUNICATION.findall(code)


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
        communication(branches, reorder_for_peak_memory=setting)
        for setting in (True, False)
    )
    assert by_memory == by_graph
    assert [name for name, _ in by_graph].count("cp.relayout") == 3


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
