"""Inductor's cache never hands one rank the unrolled ring of another.

Before expand_ring the graphs of all ranks are equal, and Inductor's cache looks at them
before the pass; ranks of one machine share that cache.
"""

import functools
import pathlib
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh

import cpcompile as cp
from cpcompile.compile import compile_local as inductor
from cpcompile.compile.torch_cache import sources
from tests.golden.capture import fake_group


@contextmanager
def float32_products(precision):
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def compiled_key(
    rank=1, ranks=4, unroll="auto", step_kernel="auto", precision="highest", **settings
):
    """What the pass adds to the key, for one causal ring on DTensors."""
    keys = []

    class Recorded(inductor._ExpandRing):
        def uuid(self):
            keys.append(super().uuid())
            return keys[-1]

    torch._dynamo.reset()
    with (
        fake_group(rank, ranks),
        mock.patch.object(inductor, "_ExpandRing", Recorded),
        inductor_config.patch(fx_graph_cache=True, **settings),
        cp.config.patch(unroll=unroll, step_kernel=step_kernel),
        float32_products(precision),
    ):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        q = cp.shard(torch.randn(1, 2, 64, 16), mesh, dim=2)
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        step = torch.compile(
            lambda q: attend(q, q, q), backend="cp", options={"strategy": "ring"}
        )
        step(q)
    assert keys
    assert all(key == keys[0] for key in keys)
    return keys[0]


CHANGES = {
    **{f"rank {rank}": {"rank": rank} for rank in (0, 2, 3)},
    "ranks": {"ranks": 2},
    "unroll": {"unroll": 2},
    "kernel": {"step_kernel": "aten_math"},
    "precision": {"precision": "high"},
}


def test_every_change_of_the_code_changes_the_key():
    """And the same compilation has the same key."""
    before = compiled_key()
    assert compiled_key() == before
    others = {name: compiled_key(**change) for name, change in CHANGES.items()}
    assert len({before, *others.values()}) == 1 + len(CHANGES), (before, others)


def test_a_pass_of_the_user_runs_and_counts():
    """Without a uuid of its own it keeps the cache from being used."""
    seen = []
    earlier = {"post_grad_custom_pre_pass": seen.append}
    assert compiled_key(**earlier) is None
    assert [type(graph) for graph in seen] == [torch.fx.Graph]


def test_every_source_counts():
    """The passes too, which a checkout has behind a link."""
    package = pathlib.Path(cp.__file__).parent
    found = {str(path.relative_to(package)) for path in sources(package)}
    kernels = "kernels/templates/attention_step.py.jinja", "ops/step/lowering.py"
    assert found >= {
        "passes/local/expand_ring.py",
        "ops/strategies/ring_attention.py",
        *kernels,
    }
