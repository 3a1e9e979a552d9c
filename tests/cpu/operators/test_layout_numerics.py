"""Attention in balanced layouts that Inductor compiles equals attention in eager.

The references and the tolerances are those of Note [Derived tolerances].
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from cpcompile.compile.compile_local import compile_local
from cpcompile.geometry.layout import Layout
from tests.cpu.attention_cases import (
    Attended,
    AttentionCase,
    check_case,
    hybrid_arguments,
    make_inputs,
    run_case,
    sequence_mesh,
)
from tests.cpu.on_ranks import on_ranks
from tests.support.attention_calls import spec_and_extras
from tests.support.counted_shifts import counted_shifts


def compiled(case: AttentionCase, dynamic: bool):
    """out = function(q, k, v), of the tokens of this rank, by Inductor."""
    mesh = sequence_mesh(case.world)
    op = getattr(torch.ops.cp, f"{case.strategy}_attention").default
    spec, _ = spec_and_extras(case.head_dim**-0.5, case.causal, case.layout.value)
    groups = (mesh.get_group().group_name, *hybrid_arguments(case, mesh, 0))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2] * case.world if dynamic else case.seq
        return op(q, k, v, [], [length, length], spec, *groups)[0]

    torch._dynamo.reset()
    backend = partial(compile_local, mode=None)
    return torch.compile(attend, backend=backend, fullgraph=True, dynamic=dynamic)


def run_function(case: AttentionCase, function) -> tuple[Attended, tuple[int, ...]]:
    """Whole tensors in the order of the sequence, and the shifts in new code."""
    mesh = sequence_mesh(case.world)
    tokens = case.token_layout(case.seq)
    positions = tokens.positions(mesh.get_rank())
    inputs = make_inputs(case)
    q, k, v, grad = (x[:, :, positions].requires_grad_() for x in inputs)
    with (
        counted_shifts(8) as found,
        functorch_config.patch(enable_autograd_cache=False),  # as the backend does it
    ):
        out = function(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), grad.detach())

    def whole(local: Tensor, like: Tensor) -> Tensor:
        how = {"run_check": False, "shape": like.shape, "stride": like.stride()}
        x = DTensor.from_local(local.contiguous(), mesh, [Shard(2)], **how)
        return x.full_tensor()[:, :, tokens.inverse()]

    wholes = map(whole, (out.detach(), *grads), (inputs[3], *inputs[:3]))
    return Attended(*wholes), tuple(found)


COMPILED = [
    (AttentionCase(layout=Layout.ZIGZAG, seq=53, world=4, kv_heads=2), (3, 7)),
    (AttentionCase(layout=Layout.STRIPED, seq=48, kv_heads=1), (1, 3)),
    (AttentionCase(layout=Layout.FOLD, seq=37), (1, 3)),
    (AttentionCase("all_gather", layout=Layout.ZIGZAG, seq=53), (0, 0)),
    (AttentionCase("hybrid", layout=Layout.ZIGZAG, seq=48, world=4), (1, 3)),
]


@pytest.mark.parametrize(("case", "shifts"), COMPILED, ids=str)
@on_ranks(lambda case: case.world)
def test_compiled_equals_eager(case, shifts):
    """A ring is unrolled, and so is the one inside of a hybrid."""
    whole, found = run_function(case, compiled(case, False))
    assert found == shifts
    check_case(case, whole)
    eager = run_case(case)
    for field in fields(Attended) if eager is not None else ():
        x, y = getattr(whole, field.name), getattr(eager, field.name)
        assert torch.equal(x, y), field.name


SYMBOLIC = [
    (AttentionCase(layout=Layout.STRIPED), (1, 3)),
    # Limits that are symbols are integers of the call.
    (AttentionCase(layout=Layout.ZIGZAG), (1, 3)),
    (AttentionCase("hybrid", layout=Layout.ZIGZAG), (0, 0)),
]


@pytest.mark.parametrize(("case", "shifts"), SYMBOLIC, ids=str)
@on_ranks(2)
def test_one_program_for_many_lengths(case, shifts):
    """Two ranks have an odd number of tokens each of 46."""
    function = compiled(case, True)
    for number, seq in enumerate((48, 64, 46)):
        whole, found = run_function(replace(case, seq=seq), function)
        assert found == (() if number else shifts)
        check_case(replace(case, seq=seq), whole)
