"""Attention compiled with backend="cp" equals attention in one process.

Both front doors: "dtensor" hands DTensors to the compiled function, "plain" hands whole
tensors and names their sequence dimension. References and tolerances are those of
Note [Derived tolerances].
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.cpu.attention_cases import (
    Attended,
    AttentionCase,
    check_case,
    grid,
    make_inputs,
    run_case,
    run_on_grid,
    sequence_mesh,
)
from tests.support.pairwise import selected_cases

AXES = {
    "strategy": ("ring", "all_gather", "ulysses"),
    "door": ("plain", "dtensor"),
    "inner": ("inductor", "aot_eager"),
    "causal": (True, False),
    "kv_heads": (4, 2, 1),
    "dtype": (torch.float32, torch.bfloat16, torch.float16, torch.float64),
    "world": (1, 2, 3, 4),
    "seq": (64, 67, 3, 2),
}


def attention(query: Tensor, key: Tensor, value: Tensor, case: AttentionCase) -> Tensor:
    """What a user writes."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        is_causal=case.causal,
        scale=case.scale,
        enable_gqa=case.heads != case.kv_heads,
    )


def compiled(case: AttentionCase, inner: str, **options):
    torch._dynamo.reset()
    options |= {"inner": inner, "strategy": case.strategy}

    def attend(query, key, value):
        return attention(query, key, value, case)

    return torch.compile(attend, backend="cp", options=options, fullgraph=True)


def run_dtensors(case: AttentionCase, inner: str) -> Attended | None:
    function = compiled(case, inner)
    return run_case(case, lambda _, q, k, v: function(q, k, v))


def run_plain(case: AttentionCase, inner: str, **options) -> Attended:
    options = {"mesh": sequence_mesh(case.world), **options}
    shard = {"query": 2, "key": 2, "value": 2}
    function = compiled(case, inner, shard=shard, **options)
    *leaves, grad = make_inputs(case)
    leaves = [x.requires_grad_() for x in leaves]
    out = function(*leaves)
    assert not isinstance(out, DTensor)
    grads = torch.autograd.grad(out, leaves, grad)
    return Attended(out.detach(), *grads)


def run_plain_on_grid(case: AttentionCase, inner: str) -> Attended:
    """The axes of the user's mesh are the factors of a hybrid."""
    mesh = grid(case.inner)
    return run_plain(case, inner, mesh=mesh, axis=mesh.mesh_dim_names)


def run_dtensors_on_grid(case: AttentionCase, inner: str) -> Attended:
    names = grid(case.inner).mesh_dim_names
    return run_on_grid(case, compiled(case, inner, axis=names))


RUN = {"plain": run_plain, "dtensor": run_dtensors}


@pytest.mark.parametrize(
    "values",
    selected_cases(AXES),
    ids=lambda values: "-".join(str(v).replace("torch.", "") for v in values.values()),
)
def test_forward_and_gradients(pools, values):
    rest = {k: v for k, v in values.items() if k not in ("door", "inner")}
    case = AttentionCase(**rest)
    run = RUN[values["door"]]
    results = pools[case.world].run(run, case, values["inner"], timeout=120)
    for got in results if values["door"] == "plain" else results[:1]:
        check_case(case, got)


GRID = {
    "inner": ("ulysses", "ring"),
    "door": (run_plain_on_grid, run_dtensors_on_grid),
    "compiler": ("inductor", "aot_eager"),
    "causal": (True, False),
    "heads": ((4, 4), (4, 1), (3, 3), (6, 2)),
    "dtype": (torch.float32, torch.bfloat16, torch.float64),
    "seq": (64, 67, 3),
}


@pytest.mark.parametrize(
    "values",
    selected_cases(GRID),
    ids=lambda values: "-".join(
        str(getattr(v, "__name__", v)).replace("torch.", "") for v in values.values()
    ),
)
def test_a_hybrid_on_the_axes_of_a_mesh(pools, values):
    run, compiler = values.pop("door"), values.pop("compiler")
    heads, kv_heads = values.pop("heads")
    case = AttentionCase("hybrid", heads=heads, kv_heads=kv_heads, world=4, **values)
    for got in pools[4].run(run, case, compiler, timeout=120):
        check_case(case, got)


def run_two_lengths(first: AttentionCase, second: AttentionCase) -> list[Attended]:
    """One compiled function called with two sequence lengths, and the first again."""
    mesh = sequence_mesh(first.world)
    shard = {"query": 2, "key": 2, "value": 2}
    function = compiled(first, "aot_eager", mesh=mesh, shard=shard)
    results = []
    for case in (first, second, first):
        *leaves, grad = make_inputs(case)
        leaves = [x.requires_grad_() for x in leaves]
        out = function(*leaves)
        results.append(Attended(out.detach(), *torch.autograd.grad(out, leaves, grad)))
    return results


def test_the_length_may_change_from_call_to_call(pools):
    first, second = AttentionCase(seq=64), AttentionCase(seq=48)
    for results in pools[2].run(run_two_lengths, first, second, timeout=120):
        for case, got in zip((first, second, first), results, strict=True):
            check_case(case, got)
