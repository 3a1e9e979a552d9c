"""One program serves many sequence lengths, and its guards say where it ends.

Lengths that the ranks do not divide are padded inside, where nothing reads the padding.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from cpcompile.compile import attempts
from cpcompile.cost.plans import SEQUENCE_STRATEGIES, Strategy
from cpcompile.passes.model.attention import choose_strategy
from cpcompile.reporting.graph_report import recording
from cpcompile.torch_patches import symbolic_tracing
from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import compiled_on
from tests.cpu.length_cases import check, run
from tests.cpu.on_ranks import on_ranks
from tests.cpu.routed_models import ROUTED
from tests.support.bounds import Values
from tests.support.forms.repeated_models import Kind, new_model, two_steps

RING = {"strategy": "ring"}  # another strategy is another program
FORWARD = {"dynamic": None}  # the first length alone, the second for all


@dataclass(frozen=True)
class Case:
    """A model, its lengths, and the number of the program that serves each.

    programs: none are one for lengths that the ranks divide, and one for others, of
        which Inductor has one for each.
    how: door, inner, dynamic and options. marked: the dimension is marked. said: what
    a log says of programs for one length only.
    """

    model: str
    lengths: Sequence[int]
    programs: Sequence[int] = ()
    ranks: int = 2
    how: dict[str, Any] = field(default_factory=dict)
    marked: bool = False
    said: str = ""

    @property
    def served_by(self) -> list[int]:
        if self.programs:
            return [*self.programs]
        each = self.how.get("inner") == "inductor"  # whose guards differ on the ranks
        of = [0 if n % self.ranks == 0 else n if each else 1 for n in self.lengths]
        return [[*dict.fromkeys(of)].index(x) for x in of]

    def __str__(self) -> str:
        words = [self.model, *map(str, self.how.values()), *map(str, self.lengths[:2])]
        return "-".join([*words, str(self.ranks)])


ANY = (64, 32, 96, 67, 64)
MANY = [
    Case(model, ANY, how={"door": door, "inner": inner})
    for model, door, inner in (
        ("attention", "plain", "aot_eager"),
        ("attention", "dtensor", "inductor"),
        ("small_gpt", "plain", "inductor"),
        ("small_gpt", "dtensor", "aot_eager"),
    )
]
# Every rank has the same guards, whatever part of a causal mask it computes.
FORCED = [
    Case("attention", (64, 32, 96), ranks=4, how={"strategy": s.value, "inner": inner})
    for s in SEQUENCE_STRATEGIES
    for inner in ("aot_eager", "inductor")
]
# With 68 tokens a rank has an odd number of them, or halves that are odd.
BALANCED = [
    Case(model, (64, 32, 68, 128), ranks=ranks, how={
        "door": door, "inner": inner, "strategy": strategy, "layout": "zigzag",
    })
    for model, door, inner, ranks, strategy in (
        ("small_gpt", "plain", "aot_eager", 2, "ring"),
        ("small_gpt", "dtensor", "aot_eager", 4, "all_gather"),
        ("attention", "dtensor", "inductor", 4, "ring"),
        ("small_gpt", "plain", "inductor", 2, "all_gather"),
        ("small_gpt", "plain", "aot_eager", 4, "hybrid"),
        ("padded", "plain", "aot_eager", 4, "hybrid"),
        ("attention", "dtensor", "inductor", 4, "hybrid"),
    )
]  # fmt: skip
# Three ranks divide 33 and 90, two 64 and 90.
UNEVEN = [
    Case(model, (67, 64, 33, 90, 65), ranks=ranks, how=RING | {"inner": inner})
    for model, inner, ranks in (
        ("small_gpt", "aot_eager", 2), ("small_gpt", "inductor", 3),
        ("attention", "aot_eager", 3), ("normed", "inductor", 3),
        ("window", "inductor", 2), ("padded", "aot_eager", 3),
        ("padded", "inductor", 2), ("masked", "aot_eager", 2),
        ("documents", "aot_eager", 3), ("cross", "aot_eager", 2),
        ("capped", "aot_eager", 2), ("dropping", "inductor", 3),
        ("one_token", "aot_eager", 2), ("pooled", "aot_eager", 3),
        ("written", "aot_eager", 2), ("convolved", "inductor", 3),
        ("ModuleEncoder", "aot_eager", 3),
    )
]  # fmt: skip
SHIFTED = (67, 64, 33, 90, 65)  # of whose predecessors 3 ranks divide all but one
UNEVEN += [Case("shifted", SHIFTED, [0, 0, 1, 1, 2], 3, RING | {"inner": "aot_eager"})]
OTHERS = [
    # dynamic=True makes symbols of floats and of all sizes.
    *(
        Case(model, (64, 32, 128), how={"door": door, "inner": inner})
        for model in ("normed", "normed_region")
        for door in ("plain", "dtensor")
        for inner in ("aot_eager", "inductor")
    ),
    # Key ranges that are known, and ids from data.
    Case("window", (64, 32, 100), how=RING),
    Case("padded", (96, 48, 150), ranks=3, how=RING),
    # A mask that nothing shards has a symbol, which follows that of the tokens.
    Case("masked", (64, 32, 100), [0, 1, 1], how=RING | FORWARD),
    *(
        Case("small_gpt", (64, 32, 96, 48), [0, 1, 1, 1], how=FORWARD | {"door": door})
        for door in ("plain", "dtensor")
    ),
    Case("small_gpt", (64, 32, 96), how=FORWARD, marked=True),
    Case("small_gpt", (67, 66, 41, 96), [0, 1, 2, 1], ranks=3, how=FORWARD),
    Case("small_gpt", (67, 64, 33, 90, 65), how=RING | {"layout": "zigzag"}),
]
BALANCE = {"layout": "zigzag"}
CONTIGUOUS = RING | {"layout": "contiguous"}
JOINT = [
    Case("small_gpt", (67, 64, 33, 90, 65), how=CONTIGUOUS | BALANCE),
    Case("window", (67, 65, 33, 90, 34), ranks=3, how=CONTIGUOUS),
    Case("attention", (64, 32, 96), how=CONTIGUOUS | {"door": "dtensor"}),
]
# Experts of each token, and writes to parts.
FEW_EXPERTS = ("Switch", "Unflattened", "Twice", "UsedExperts", "WeightedCounts",
               "Routed", "ScatterAdd", "Dense")  # fmt: skip
EXPERTS = [
    *(
        Case(x, (64, 32, 96), [0, 1, 2] if x == "TokensMeet" else ())
        for x in (*ROUTED, "written")
    ),
    Case("Twice", (67, 64, 33), how=RING | {"inner": "inductor"}),
    *(Case(x, (67, 33, 65), how=RING) for x in FEW_EXPERTS),
]
# Of InPlace some calls run on gathered tensors, whatever the sizes are.
NOT_STRICT, ONE_LENGTH = {"strict": False}, [0, 1, 0]
SAID = [
    *(
        Case(name, (64, 32, 96), how=NOT_STRICT, said="")
        for name in ("shifted", "InPlace", "ModuleEncoder", "one_token")
    ),
    Case("NoRule", (64, 32, 64), ONE_LENGTH, how=NOT_STRICT,
         said="Cannot call numel() on tensor with symbolic sizes/strides"),
    Case("half", (64, 32, 64), ONE_LENGTH, how=NOT_STRICT,
         said="tokens, and the sequence has"),
    *(
        Case(name, (67, 33, 67), ONE_LENGTH, said=why)
        for name, why in (
            ("half", "has another number of tokens"),
            ("NoRule", "cummax lets the tokens meet"),
            ("InPlace", "scatter_ lets the tokens meet"),
        )
    ),
]  # fmt: skip


def found_of(case: Case) -> list[tuple]:
    """Number of the program, strategy and deviations of each length."""
    how = {"door": "plain", "inner": "aot_eager", "dynamic": True} | case.how
    first = (how.pop(name) for name in ("door", "inner", "dynamic"))
    return run(case.model, *first, case.lengths, case.marked, **how)


@pytest.mark.parametrize(
    "case", [*MANY, *FORCED, *BALANCED, *UNEVEN, *OTHERS, *JOINT, *EXPERTS], ids=str
)
@on_ranks(lambda case: case.ranks)
def test_one_program_serves_many_lengths(case):
    with recording() as reports:
        found = found_of(case)
    check([found], case.served_by)
    if "layout" in case.how:
        layouts = {call.plan.layout.value for x in reports for call in x.calls}
        assert layouts == {case.how["layout"]}
    if case in FORCED:
        assert {strategy for _, strategy, _ in found} == {case.how["strategy"]}


@pytest.mark.parametrize("case", SAID, ids=str)
@on_ranks(2)
def test_what_is_said_of_programs_for_one_length(case):
    """Those that torch cannot make symbolic."""
    with warnings(logging.INFO) as lines:
        found = found_of(case)
    texts = [x for x in lines if "forward serves the sizes of one call only: " in x]
    if case.model == "NoRule" and not texts:  # torch 2.15 can do this one
        check([found], [0] * len(found))
        return
    check([found], case.served_by)
    assert bool(texts) == bool(case.said), texts
    assert all(case.said in text for text in texts), texts


@pytest.mark.parametrize("name", ["normed", "normed_region"])
@on_ranks(2)
def test_floats_are_known_before_the_passes_run(name):
    """AOTAutograd would have Dynamo trace again, after all passes."""
    counted = mock.Mock(wraps=attempts.run_passes)
    with mock.patch.object(attempts, "run_passes", counted):
        found_of(Case(name, (64,)))
    assert counted.call_count == 1


BORDER = 64


@pytest.mark.parametrize("case", MANY, ids=str)
@on_ranks(2)
def test_the_border_of_a_strategy_recompiles_once(case):
    """As if the ring were the best from BORDER tokens on, and all_gather below."""
    choose = choose_strategy.choose

    def chooses(question, profile, **rest):
        best = Strategy.RING if question.q_len >= BORDER else Strategy.ALL_GATHER
        plan = choose(question, profile, **rest | {"strategy": best})
        return dataclasses.replace(plan, forced=False)

    lengths = (32, 48, 62, 64, 96, 128, 40, 66)
    with mock.patch.object(choose_strategy, "choose", chooses):
        found = found_of(dataclasses.replace(case, lengths=lengths))
    check([found], [0, 0, 0, 1, 1, 1, 0, 1])
    below, above = ["all_gather"] * 3, ["ring"] * 3
    assert [x for _, x, _ in found] == [*below, *above, "all_gather", "ring"]


@on_ranks(2)
def test_ranks_with_unlike_guards_compile_per_length():
    """As if a rank had a guard that the others have not."""
    guards_on = symbolic_tracing.guards_on
    rank = torch.distributed.get_rank()
    different = mock.patch.object(
        symbolic_tracing, "guards_on", lambda x: f"{guards_on(x)} {rank}"
    )
    with different:
        check([found_of(Case("attention", (64, 32, 64)))], [0, 1, 0])


@on_ranks(2)
def test_dropout_of_attention_is_that_of_one_length():
    found: list[Values] = []
    for dynamic in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = new_model(Kind(attention_dropout=0.3), layers=1)
        step = compiled_on(2, model, dynamic=dynamic, **RING)
        with recording() as reports:
            found.append(two_steps(step, model))
        assert reports[0].calls[0].plan is not None
    torch.testing.assert_close(*found, rtol=0, atol=0)
