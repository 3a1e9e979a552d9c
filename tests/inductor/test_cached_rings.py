"""Inductor's cache never hands one rank the unrolled ring of another.

Before expand_ring the graphs of all ranks are equal, and Inductor's cache looks at them
before the pass; ranks of one machine share that cache.
"""

import pathlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh

import cpcompile as cp
from cpcompile.compile import compile_local as inductor
from cpcompile.compile.sources import sources
from tests.golden.capture import fake_group


def compiled_key(rank, ranks=4, unroll="auto", **settings):
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
        cp.config.patch(unroll=unroll),
    ):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        q = cp.shard(torch.randn(1, 2, 64, 16), mesh, dim=2)
        options = {"strategy": "ring"}
        attend = torch.compile(
            lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True),
            backend="cp",
            options=options,
        )
        attend(q)
    assert keys
    assert all(key == keys[0] for key in keys)
    return keys[0]


def test_ranks_have_different_keys():
    keys = {compiled_key(rank) for rank in range(4)}
    assert len(keys) == 4


def test_the_same_compilation_has_the_same_key():
    assert compiled_key(1) == compiled_key(1)


@pytest.mark.parametrize("change", ["ranks", "unroll", "kernel", "precision"])
def test_what_changes_the_code_changes_the_key(change):
    before = compiled_key(1)
    if change == "ranks":
        after = compiled_key(1, ranks=2)
    elif change == "unroll":
        after = compiled_key(1, unroll=2)
    elif change == "kernel":
        with cp.config.patch(step_kernel="aten_math"):
            after = compiled_key(1)
    else:
        torch.set_float32_matmul_precision("high")
        try:
            after = compiled_key(1)
        finally:
            torch.set_float32_matmul_precision("highest")
    assert before != after


def test_a_pass_of_the_user_runs_and_counts():
    """Without a uuid of its own it keeps the cache from being used."""
    seen = []
    earlier = {"post_grad_custom_pre_pass": seen.append}
    assert compiled_key(1, **earlier) is None
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
