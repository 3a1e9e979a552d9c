"""One program serves many sequence lengths, and its guards say where it ends."""

import dataclasses
import logging
from unittest import mock

import pytest
import torch

from cpcompile.compile import attempts
from cpcompile.cost.plans import SEQUENCE_STRATEGIES, Strategy
from cpcompile.passes.model.attention import choose_strategy
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.length_cases import MODELS, check, inputs_of, run, small_gpt
from tests.support import bounds
from tests.support.bounds import Deviation, deviations, in_one_process
from tests.support.pairwise import selected_cases

AXES = {
    "name": ("attention", "small_gpt"),
    "door": ("plain", "dtensor"),
    "inner": ("aot_eager", "inductor"),
}
FOUND = [tuple(case.values()) for case in selected_cases(AXES)]
CASES = pytest.mark.parametrize(("name", "door", "inner"), FOUND)


@CASES
def test_one_program_serves_many_lengths(pools, name, door, inner):
    """67 is no multiple of 2: plain tensors are padded, DTensors have another program.

    The program that is found last is asked first, and a padded one serves 64 as well.
    """
    lengths = (64, 32, 96, 67, 64)
    args = (name, door, inner, True, lengths)
    last = 1 if door == "plain" else 0
    check(pools[2].run(run, *args, timeout=170), [0, 0, 0, 1, last])


FORCED = [
    (s.value, inner) for s in SEQUENCE_STRATEGIES for inner in ("aot_eager", "inductor")
]


@pytest.mark.parametrize(("strategy", "inner"), FORCED)
def test_every_strategy_on_four_ranks(pools, strategy, inner):
    """Every rank has the same guards, whatever part of a causal mask it computes."""
    args = ("attention", "plain", inner, True, (64, 32, 96))
    answers = pools[4].run(run_forced, strategy, args)
    check(answers, [0, 0, 0])
    assert {strategy} == {x for found in answers for _, x, _ in found}


def run_forced(strategy, args) -> list[tuple]:
    return run(*args, strategy=strategy)


BALANCED = [
    ("small_gpt", "plain", "aot_eager", 2, "ring"),
    ("small_gpt", "dtensor", "aot_eager", 4, "all_gather"),
    ("attention", "dtensor", "inductor", 4, "ring"),
    ("small_gpt", "plain", "inductor", 2, "all_gather"),
    ("small_gpt", "plain", "aot_eager", 4, "hybrid"),
    ("padded", "plain", "aot_eager", 4, "hybrid"),
    ("attention", "dtensor", "inductor", 4, "hybrid"),
]


def run_balanced(args, options) -> tuple[list[tuple], set[str]]:
    """Also the layouts of the plans."""
    with recording() as reports:
        found = run(*args, **options)
    return found, {call.plan.layout.value for x in reports for call in x.calls}


def check_balanced(answers, layout: str, programs: list[int]) -> None:
    check([found for found, _ in answers], programs)
    assert [layouts for _, layouts in answers] == [{layout}] * len(answers)


@pytest.mark.parametrize(("name", "door", "inner", "ranks", "strategy"), BALANCED)
def test_a_balanced_layout(pools, name, door, inner, ranks, strategy):
    """With 68 tokens a rank has an odd number of them, or halves that are odd."""
    args = (name, door, inner, True, (64, 32, 68, 128))
    options = {"layout": "zigzag", "strategy": strategy}
    answers = pools[ranks].run(run_balanced, args, options, timeout=170)
    check_balanced(answers, "zigzag", [0] * 4)


@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["normed", "normed_region"])
def test_what_else_is_symbolic_gets_its_value(pools, name, door, inner):
    """dynamic=True makes symbols of floats and of all sizes."""
    args = (name, door, inner, True, (64, 32, 128))
    check(pools[2].run(run, *args, timeout=170), [0, 0, 0])


def passes_run(name: str) -> int:
    """How many times the passes run for one program with floats."""
    counted = mock.Mock(wraps=attempts.run_passes)
    with mock.patch.object(attempts, "run_passes", counted):
        run(name, "plain", "aot_eager", True, (64,))
    return counted.call_count


@pytest.mark.parametrize("name", ["normed", "normed_region"])
def test_floats_are_known_before_the_passes_run(pools, name):
    """AOTAutograd would have Dynamo trace again, after all passes."""
    assert pools[2].run(passes_run, name, timeout=90) == [1, 1]


def run_with_another_scale() -> list[float]:
    """How far each result is from that of eager."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS["normed"]()
    options = {"mesh": sequence_mesh(2), "shard": {"x": 1}, "inner": "aot_eager"}
    step = torch.compile(model, backend="cp", options=options, dynamic=True)
    found = []
    for model.scale, seq in ((0.3, 64), (0.5, 64), (0.5, 32), (0.3, 32)):
        x = inputs_of("normed", seq, torch.float32)["x"]
        found.append(float((step(x) - model(x)).abs().max()))
    return found


def test_another_float_is_compiled_anew(pools):
    for found in pools[2].run(run_with_another_scale, timeout=90):
        assert max(found) < 1e-5


@pytest.mark.parametrize("door", ["plain", "dtensor"])
def test_the_second_length_makes_it_symbolic(pools, door):
    """dynamic=None: the first length is compiled alone, the second for all."""
    args = ("small_gpt", door, "aot_eager", None, (64, 32, 96, 48))
    check(pools[2].run(run, *args, timeout=90), [0, 1, 1, 1])


def test_a_marked_dimension(pools):
    args = ("small_gpt", "plain", "aot_eager", None, (64, 32, 96), True)
    check(pools[2].run(run, *args, timeout=90), [0, 0, 0])


def run_inference(inner: str) -> tuple[int, list[Deviation]]:
    torch._dynamo.reset()
    model = small_gpt().eval()
    options = {"mesh": sequence_mesh(2), "shard": {"tokens": 1}, "inner": inner}
    step = torch.compile(model, backend="cp", options=options, dynamic=True)
    found = []
    with torch.no_grad(), recording() as reports:
        for seq in (64, 32, 96):
            tokens = inputs_of("small_gpt", seq, torch.float32)["tokens"]
            values = in_one_process(lambda x, t=tokens: {"logits": x(t)[0]}, model)
            found += deviations({"logits": step(tokens)[0]}, *values)
    return len(set(map(id, reports))), found


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_inference(pools, inner):
    for programs, found in pools[2].run(run_inference, inner, timeout=90):
        assert programs == 1
        bounds.check(found)


BORDER = 64


def run_across_the_border(name, door, inner) -> list[tuple]:
    """As if the ring were the best from BORDER tokens on, and all_gather below."""
    choose = choose_strategy.choose

    def chooses(question, profile, **rest):
        best = Strategy.RING if question.q_len >= BORDER else Strategy.ALL_GATHER
        plan = choose(question, profile, **rest | {"strategy": best})
        return dataclasses.replace(plan, forced=False)

    with mock.patch.object(choose_strategy, "choose", chooses):
        return run(name, door, inner, True, (32, 48, 62, 64, 96, 128, 40, 66))


@CASES
def test_the_border_of_a_strategy_recompiles_once(pools, name, door, inner):
    answers = pools[2].run(run_across_the_border, name, door, inner, timeout=170)
    check(answers, [0, 0, 0, 1, 1, 1, 0, 1])
    for found in answers:
        below, above = ["all_gather"] * 3, ["ring"] * 3
        assert [x for _, x, _ in found] == [*below, *above, "all_gather", "ring"]


@pytest.mark.parametrize(
    ("name", "world", "inner"),
    [("window", 2, "aot_eager"), ("padded", 3, "aot_eager"), ("padded", 2, "inductor")],
)
def test_masks(pools, name, world, inner):
    """Key ranges that are known, and ids from data."""
    lengths = tuple(world * n for n in (32, 16, 50))
    strategy = {"strategy": "ring"}  # one plan for all lengths
    answers = pools[world].run(run_with, name, inner, lengths, strategy)
    check(answers, [0, 0, 0])


def test_a_mask_that_nothing_shards(pools):
    """It has a symbol of its own, which follows that of the sequence by a guard."""
    call = ("masked", "aot_eager", (64, 32, 100), {"strategy": "ring"}, None)
    check(pools[2].run(run_with, *call), [0, 1, 1])


def run_with(name, inner, lengths, options, dynamic=True) -> list[tuple]:
    return run(name, "plain", inner, dynamic, lengths, **options)


def run_logged(name: str, lengths) -> tuple[list[tuple], list[str]]:
    records: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())
    log = logging.getLogger("cpcompile.torch_patches.symbolic_tracing")
    log.addHandler(handler)
    level, _ = log.level, log.setLevel(logging.INFO)
    try:
        found = run(name, "plain", "aot_eager", True, lengths, strict=False)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return found, [text for text in records if "one sequence length" in text]


@pytest.mark.parametrize("name", ["InPlace", "shifted", "ModuleEncoder"])
def test_programs_around_attention(pools, name):
    """Of InPlace some calls run on gathered tensors, whatever the sizes are."""
    for found, texts in pools[2].run(run_logged, name, (64, 32, 96), timeout=90):
        check([found], [0, 0, 0])
        assert not texts


def test_what_is_only_right_for_padded_lengths_serves_multiples_too(pools):
    """torch cannot slice the last token of a sharded length that is a symbol."""
    for found, texts in pools[2].run(run_logged, "one_token", (64, 32, 96), timeout=90):
        check([found], [0, 0, 0])
        assert not texts


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NoRule", "Cannot call numel() on tensor with symbolic sizes/strides"),
        ("half", "tokens, and the sequence has"),
    ],
)
def test_what_cannot_be_symbolic_is_compiled_per_length(pools, name, reason):
    """What torch cannot do with symbols, and attention over another length."""
    for found, texts in pools[2].run(run_logged, name, (64, 32, 64), timeout=90):
        if name == "NoRule" and not texts:  # torch 2.15 can do this one
            check([found], [0, 0, 0])
            continue
        check([found], [0, 1, 0])
        assert texts and all(reason in text for text in texts), texts


def run_unlike_guards() -> list[tuple]:
    """As if a rank had a guard that the others have not."""
    from cpcompile.torch_patches import symbolic_tracing

    guards_on = symbolic_tracing.guards_on
    rank = torch.distributed.get_rank()
    different = mock.patch.object(
        symbolic_tracing, "guards_on", lambda x: f"{guards_on(x)} {rank}"
    )
    with different:
        return run("attention", "plain", "aot_eager", True, (64, 32, 64))


def test_ranks_with_unlike_guards_compile_per_length(pools):
    check(pools[2].run(run_unlike_guards), [0, 1, 0])
