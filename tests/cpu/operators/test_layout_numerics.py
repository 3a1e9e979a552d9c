"""Attention in balanced layouts equals attention in one process.

The references and the tolerances are those of Note [Derived tolerances].
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from cpcompile import config
from cpcompile.compile import compile_local as inductor
from cpcompile.compile.compile_local import compile_local
from cpcompile.compile.overlap import check_overlap
from cpcompile.geometry.layout import Layout
from cpcompile.kernels.choice import StepKernel
from cpcompile.ranks.mesh_factors import hybrid_groups
from tests.cpu.attention_cases import (
    Attended,
    AttentionCase,
    check_case,
    make_inputs,
    run_case,
    sequence_mesh,
)
from tests.support.attention_calls import spec_and_extras
from tests.support.pairwise import selected_cases

KINDS = [
    *(("ring", layout) for layout in Layout if layout is not Layout.CONTIGUOUS),
    ("all_gather", Layout.ZIGZAG),
    ("hybrid", Layout.ZIGZAG),
]
AXES = {
    "kind": KINDS,
    "causal": (True, False),
    "kv_heads": (4, 2, 1),  # of 4 query heads
    "dtype": (torch.float32, torch.float64),
    "world": (2, 3, 4),
    # Twice as many ranks divide 48. With 67 the last rank holds fewer tokens, and all
    # an odd number; 9 are barely two for each; with 2 some ranks hold none.
    "seq": (48, 67, 9, 2),
    "value_dim": (None, 5),
}


def make_case(values: dict) -> AttentionCase:
    strategy, layout = values.pop("kind")
    return AttentionCase(strategy, layout=layout, **values)


def run_and_check(pools, case: AttentionCase) -> None:
    check_case(case, pools[case.world].run(run_case, case)[0])


@pytest.mark.parametrize("case", map(make_case, selected_cases(AXES)), ids=str)
def test_forward_and_gradients(pools, case):
    run_and_check(pools, case)


@pytest.mark.parametrize(("strategy", "layout"), KINDS)
@pytest.mark.parametrize("seq", [67, 5, 4])
def test_causal_on_four_ranks(pools, strategy, layout, seq):
    """Of 5 tokens the ranks hold 2, 2, 1 and 0; of 4 they hold one each."""
    case = AttentionCase(strategy, layout=layout, seq=seq, world=4, value_dim=5)
    run_and_check(pools, replace(case, kv_heads=2, dtype=torch.float64))


@pytest.mark.parametrize("seq", [64, 61])
@pytest.mark.parametrize("ulysses", [1, 4])
def test_hybrids_without_a_ring_or_an_exchange(pools, ulysses, seq):
    case = AttentionCase("hybrid", layout=Layout.ZIGZAG, ulysses=ulysses, seq=seq)
    run_and_check(pools, replace(case, world=4))


@pytest.mark.parametrize(("strategy", "layout"), KINDS)
def test_cross_attention_without_a_mask(pools, strategy, layout):
    case = AttentionCase(strategy, layout=layout, seq=30, kv_seq=67, world=4)
    run_and_check(pools, replace(case, causal=False))


@pytest.mark.parametrize(("strategy", "layout"), KINDS)
def test_operands_that_are_not_sharded_yet(pools, strategy, layout):
    placements = {"q_placement": Replicate(), "kv_placement": Shard(1)}
    case = AttentionCase(strategy, layout=layout, seq=37, world=2, **placements)
    run_and_check(pools, case)


@pytest.mark.parametrize(("strategy", "layout"), KINDS)
def test_two_kernels_of_the_backward(pools, strategy, layout):
    """One for dk and dv, one for dq, as the templates are; here of matrix products."""
    case = AttentionCase(strategy, layout=layout, seq=37, world=4, kv_heads=2)
    check_case(case, pools[4].run(run_two_kernels, case)[0])


def run_two_kernels(case: AttentionCase) -> Attended | None:
    kernels = SimpleNamespace(TEMPLATE=StepKernel.MATH)
    with ExitStack() as stack:
        stack.enter_context(config.patch(step_kernel=StepKernel.MATH.value))
        for name in ("ring_steps", "all_gather_attention"):
            module = import_module(f"cpcompile.ops.strategies.{name}")
            stack.enter_context(mock.patch.object(module, "StepKernel", kernels))
        return run_case(case)


COMPILED = [
    (AttentionCase(layout=Layout.ZIGZAG, seq=53, world=4, kv_heads=2), (3, 7)),
    (AttentionCase(layout=Layout.STRIPED, seq=48, kv_heads=1), (1, 3)),
    (AttentionCase(layout=Layout.FOLD, seq=37), (1, 3)),
    (AttentionCase("all_gather", layout=Layout.ZIGZAG, seq=53), (0, 0)),
    (AttentionCase("hybrid", layout=Layout.ZIGZAG, seq=48, world=4), (1, 3)),
]


@pytest.mark.parametrize(("case", "shifts"), COMPILED, ids=str)
def test_compiled_equals_eager(pools, case, shifts):
    """A ring is unrolled, and so is the one inside of a hybrid."""
    (ran,) = by_length([case], pools[case.world].run(run_lengths, [case], timeout=120))
    assert {x.shifts for x in ran} == {shifts}
    assert not any(x.works_left for x in ran)
    whole = together(case, ran)
    check_case(case, whole)
    eager = pools[case.world].run(run_case, case)[0]
    for field in fields(Attended):
        x, y = getattr(whole, field.name), getattr(eager, field.name)
        assert torch.equal(x, y), field.name


SYMBOLIC = [
    (AttentionCase(layout=Layout.STRIPED), (1, 3)),
    # Limits that are symbols are integers of the call.
    (AttentionCase(layout=Layout.ZIGZAG), (1, 3)),
    (AttentionCase("hybrid", layout=Layout.ZIGZAG), (0, 0)),
]


@pytest.mark.parametrize(("case", "shifts"), SYMBOLIC, ids=str)
def test_one_program_for_many_lengths(pools, case, shifts):
    """Two ranks have an odd number of tokens each of 46."""
    cases = [replace(case, seq=seq) for seq in (48, 64, 46)]
    answers = pools[2].run(run_lengths, cases, True, timeout=120)
    for number, ran in enumerate(by_length(cases, answers)):
        assert {x.shifts for x in ran} == {() if number else shifts}
        check_case(cases[number], together(cases[number], ran))


@dataclass(frozen=True)
class Ran:
    """What one rank saw of a compiled attention."""

    local: Attended
    shifts: tuple[int, ...]  # in the code of forward and backward
    works_left: int


def by_length(cases: list[AttentionCase], answers: list[list[Ran]]) -> list[list[Ran]]:
    """What the ranks saw, one list per length."""
    return [[of_rank[i] for of_rank in answers] for i in range(len(cases))]


def together(case: AttentionCase, ran: list[Ran]) -> Attended:
    """Whole tensors in the order of the sequence, of the ranks' local ones."""
    inverse = case.token_layout(case.seq).inverse()
    parts = ([getattr(x.local, f.name) for x in ran] for f in fields(Attended))
    return Attended(*(torch.cat(each, 2)[:, :, inverse] for each in parts))


def run_lengths(cases: list[AttentionCase], dynamic: bool = False) -> list[Ran]:
    """One compiled function at several lengths."""
    torch._dynamo.reset()
    function = compiled(cases[0], dynamic)
    return [run_function(case, function) for case in cases]


def compiled(case: AttentionCase, dynamic: bool):
    """out = function(q, k, v), of the tokens of this rank, by Inductor."""
    mesh = sequence_mesh(case.world)
    op = getattr(torch.ops.cp, f"{case.strategy}_attention").default
    layout = case.layout.value
    spec, _ = spec_and_extras(case.head_dim**-0.5, case.causal, layout)
    groups: tuple[str | bool, ...] = (mesh.get_group().group_name,)
    if case.strategy == "hybrid":
        own = hybrid_groups(mesh, 0, case.degrees)
        groups += (own.ulysses, own.ring, True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2] * case.world if dynamic else case.seq
        return op(q, k, v, [], [length, length], spec, *groups)[0]

    backend = partial(compile_local, mode=None)
    return torch.compile(attend, backend=backend, fullgraph=True, dynamic=dynamic)


def run_function(case: AttentionCase, function) -> Ran:
    """Forward and gradients of this rank's tokens."""
    positions = case.token_layout(case.seq).positions(
        sequence_mesh(case.world).get_rank()
    )
    q, k, v, grad = (x[:, :, positions].requires_grad_() for x in make_inputs(case))
    found: list[int] = []

    def check(code: str) -> None:
        found.append(len(check_overlap(code)))

    with (
        config.patch(check_overlap=True, unroll=8),
        functorch_config.patch(enable_autograd_cache=False),  # as the backend does it
        mock.patch.object(inductor, "check_overlap", check),
    ):
        out = function(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), grad.detach())
    left = torch._C._distributed_c10d._get_work_registry_size()
    return Ran(Attended(out.detach(), *grads), tuple(found), left)
