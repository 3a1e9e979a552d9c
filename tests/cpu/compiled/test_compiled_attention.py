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
from tests.cpu.on_ranks import on_ranks
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


def run_plain(case: AttentionCase, inner: str, *calls: AttentionCase, **options):
    """The results of every call, of `case` unless there are others."""
    options = {"mesh": sequence_mesh(case.world), **options}
    shard = {"query": 2, "key": 2, "value": 2}
    function = compiled(case, inner, shard=shard, **options)
    results = []
    for each in calls or (case,):
        *leaves, grad = make_inputs(each)
        leaves = [x.requires_grad_() for x in leaves]
        out = function(*leaves)
        assert not isinstance(out, DTensor)
        results.append(Attended(out.detach(), *torch.autograd.grad(out, leaves, grad)))
    return results if calls else results[0]


def run_plain_on_grid(case: AttentionCase, inner: str) -> Attended:
    """The axes of the user's mesh are the factors of a hybrid."""
    mesh = grid(case.inner)
    return run_plain(case, inner, mesh=mesh, axis=mesh.mesh_dim_names)


def run_dtensors_on_grid(case: AttentionCase, inner: str) -> Attended:
    names = grid(case.inner).mesh_dim_names
    return run_on_grid(case, compiled(case, inner, axis=names))


RUN = {"plain": run_plain, "dtensor": run_dtensors}
RUN_ON_GRID = {"plain": run_plain_on_grid, "dtensor": run_dtensors_on_grid}
GRID = {
    "inner": ("ulysses", "ring"),
    "door": ("plain", "dtensor"),
    "compiler": ("inductor", "aot_eager"),
    "causal": (True, False),
    "heads": ((4, 4), (4, 1), (3, 3), (6, 2)),
    "dtype": (torch.float32, torch.bfloat16, torch.float64),
    "seq": (64, 67, 3),
}


def on_grid(values: dict) -> tuple[AttentionCase, str, str]:
    """A hybrid of four ranks, on the axes of a mesh."""
    heads, kv_heads = values.pop("heads")
    rest = {"heads": heads, "kv_heads": kv_heads, "world": 4}
    how = values.pop("door"), values.pop("compiler")
    return AttentionCase("hybrid", **rest, **values), *how


def on_a_line(values: dict) -> tuple[AttentionCase, str, str]:
    how = values.pop("door"), values.pop("inner")
    return AttentionCase(**values), *how


CASES = [*map(on_a_line, selected_cases(AXES)), *map(on_grid, selected_cases(GRID))]


@pytest.mark.parametrize(("case", "door", "compiler"), CASES, ids=str)
@on_ranks(lambda case: case.world)
def test_forward_and_gradients(case, door, compiler):
    run = (RUN_ON_GRID if case.strategy == "hybrid" else RUN)[door]
    got = run(case, compiler)
    if got is not None:  # which rank 0 has
        check_case(case, got)


@on_ranks(2)
def test_the_length_may_change_from_call_to_call():
    """One compiled function called with two sequence lengths, and the first again."""
    first, second = AttentionCase(seq=64), AttentionCase(seq=48)
    calls = (first, second, first)
    for case, got in zip(calls, run_plain(first, "aot_eager", *calls), strict=True):
        check_case(case, got)
