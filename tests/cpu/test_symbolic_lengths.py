"""One program serves many sequence lengths, and its guards say where it ends.

The reference is the same call in one process in float64. Programs are counted by the
reports of the graphs that ran: each compiled graph has its own.
"""

import copy
import dataclasses
import logging
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import cpcompile as cp
from cpcompile.passes import choose_strategy
from cpcompile.plans import Strategy
from cpcompile.report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.pairwise import selected_cases
from tests.cpu.test_programs import PROGRAMS, Base
from tests.models.small_gpt import SmallGPT

VOCABULARY = 50


class Attention(nn.Module):
    """Nothing but the call, on [B, H, S, D].

    No other size is ever as long as a chunk: to Dynamo equal sizes are one symbol.
    """

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class HalfTheKeys(Base):
    """Attention over a length that depends on the one of the sequence."""

    def after(self, x):
        half = x.unsqueeze(1)[:, :, : x.shape[1] // 2]
        return F.scaled_dot_product_attention(x.unsqueeze(1), half, half).sum()


class Window(Base):
    """A mask whose size is the length."""

    def after(self, x):
        rows = torch.arange(x.shape[1])[:, None]
        columns = torch.arange(x.shape[1])
        mask = (columns <= rows) & (columns > rows - 4)
        mask = mask.expand(x.shape[0], 1, -1, x.shape[1])
        x = x.unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum()


class Shifted(Base):
    """All tokens but the last, and but the first: shards of unequal sizes."""

    def after(self, x):
        return (x[:, :-1] * x[:, 1:]).sin().sum()


class OneToken(Base):
    """A view with a symbolic stride and without a symbolic size."""

    def after(self, x):
        return x[:, -1].square().mean()


def small_gpt() -> nn.Module:
    return SmallGPT(vocabulary=VOCABULARY, context=512, layers=1)


MODELS = {"attention": Attention, "small_gpt": small_gpt}
MODELS |= {"half": HalfTheKeys, "shifted": Shifted, "one_token": OneToken}
MODELS["window"] = Window
MODELS |= {name: PROGRAMS[name] for name in ("InPlace", "ModuleEncoder", "NoRule")}


def inputs_of(name: str, seq: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seq)
    if name == "attention":
        return {
            key: torch.randn(2, 4, seq, 8, generator=generator, dtype=torch.float64)
            .to(dtype)
            .requires_grad_()
            for key in "qkv"
        }
    tokens = torch.randint(0, VOCABULARY, (2, seq), generator=generator)
    if name != "small_gpt":
        return {"tokens": tokens}
    labels = tokens.clone()
    labels[0, : seq // 3] = -100  # the ranks have unevenly many labels
    return {"tokens": tokens, "labels": labels}


def whole(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().double()


def results(model: nn.Module, call, inputs) -> list[torch.Tensor]:
    """What the call returns, and all gradients of a sum of it."""
    model.zero_grad()
    returned = call(**inputs)
    returned = list(returned) if isinstance(returned, tuple) else [returned]
    loss = returned[-1]
    loss.backward() if loss.ndim == 0 else loss.sin().sum().backward()
    leaves = [*model.parameters(), *inputs.values()]
    gradients = [x.grad for x in leaves if x.requires_grad and x.grad is not None]
    return [whole(x) for x in (*returned, *gradients)]


def error(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Relative to the largest value of a tensor, gradients together."""
    size = max(x.abs().max().item() for x in wanted[1:])
    return max(
        (x - y).abs().max().item() / max(y.abs().max().item(), 1e-3 * size)
        for x, y in zip(got, wanted, strict=True)
    )


def run(name, door, inner, dynamic, lengths, marked=False, **options) -> list[tuple]:
    """For every length: number of the program, its strategy, error."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = sequence_mesh(torch.distributed.get_world_size())
    model = MODELS[name]()
    alone = copy.deepcopy(model).double()
    dim = 2 if name == "attention" else 1
    options |= {"inner": inner}
    if door == "plain":
        shard = dict.fromkeys(inputs_of(name, 8, torch.float32), dim)
        options |= {"mesh": mesh, "shard": shard}
    step = torch.compile(model, backend="cp", options=options, dynamic=dynamic)
    programs, found = [], []
    for seq in lengths:
        wanted = results(alone, alone, inputs_of(name, seq, torch.float64))
        inputs = inputs_of(name, seq, torch.float32)
        if door == "dtensor":
            inputs = {
                key: cp.shard(x.detach(), mesh, dim).requires_grad_(x.requires_grad)
                for key, x in inputs.items()
            }
        for x in inputs.values() if marked else ():
            torch._dynamo.mark_dynamic(x, dim)
        with recording() as reports:
            got = results(model, step, inputs)
        (report,) = reports
        if report not in programs:
            programs.append(report)
        strategy = report.calls[0].plan.strategy.value
        found.append((programs.index(report), strategy, error(got, wanted)))
    return found


def check(answers, programs, limit=1e-5) -> None:
    for found in answers:
        assert [number for number, _, _ in found] == programs, found
        assert max(wrong for _, _, wrong in found) < limit, found


AXES = {
    "name": ("attention", "small_gpt"),
    "door": ("plain", "dtensor"),
    "inner": ("aot_eager", "inductor"),
}
SLOW = ("small_gpt", "plain", "inductor")
FOUND = [tuple(case.values()) for case in selected_cases(AXES)]
MARKED = [pytest.param(*x, marks=[pytest.mark.slow] * (x == SLOW)) for x in FOUND]
CASES = pytest.mark.parametrize(("name", "door", "inner"), MARKED)


@CASES
def test_one_program_serves_many_lengths(pools, name, door, inner):
    """67 is no multiple of 2 and has a program of its own."""
    lengths = (64, 32, 96, 67, 64)
    args = (name, door, inner, True, lengths)
    check(pools[2].run(run, *args, timeout=170), [0, 0, 0, 1, 0])


@pytest.mark.parametrize("strategy", [s.value for s in Strategy])
def test_every_strategy_on_four_ranks(pools, strategy):
    """Every rank has the same guards, whatever part of a causal mask it computes."""
    for inner in ("aot_eager", "inductor"):
        answers = pools[4].run(
            run_forced, strategy, ("attention", "plain", inner, True, (64, 32, 96))
        )
        check(answers, [0, 0, 0])
        assert {strategy} == {x for found in answers for _, x, _ in found}


def run_forced(strategy, args) -> list[tuple]:
    return run(*args, strategy=strategy)


@pytest.mark.parametrize("door", ["plain", "dtensor"])
def test_the_second_length_makes_it_symbolic(pools, door):
    """dynamic=None: the first length is compiled alone, the second for all."""
    args = ("small_gpt", door, "aot_eager", None, (64, 32, 96, 48))
    check(pools[2].run(run, *args, timeout=90), [0, 1, 1, 1])


def test_a_marked_dimension(pools):
    args = ("small_gpt", "plain", "aot_eager", None, (64, 32, 96), True)
    check(pools[2].run(run, *args, timeout=90), [0, 0, 0])


def run_inference(inner: str) -> tuple[int, float]:
    torch._dynamo.reset()
    model = small_gpt().eval()
    options = {"mesh": sequence_mesh(2), "shard": {"tokens": 1}, "inner": inner}
    step = torch.compile(model, backend="cp", options=options, dynamic=True)
    wrong = 0.0
    with torch.no_grad(), recording() as reports:
        for seq in (64, 32, 96):
            tokens = inputs_of("small_gpt", seq, torch.float32)["tokens"]
            got, wanted = step(tokens)[0], model(tokens)[0]
            wrong = max(wrong, ((got - wanted).abs().max() / wanted.abs().max()).item())
    return len(set(map(id, reports))), wrong


@pytest.mark.parametrize(
    "inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_inference(pools, inner):
    for programs, wrong in pools[2].run(run_inference, inner, timeout=90):
        assert programs == 1 and wrong < 1e-5


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


def run_logged(name: str, lengths) -> tuple[list[tuple], list[str]]:
    records: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())
    log = logging.getLogger("cpcompile.symbolic_tracing")
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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NoRule", "Cannot call numel() on tensor with symbolic sizes/strides"),
        ("half", "tokens, and the sequence has"),
        ("one_token", "unhashable type: non-nested SymInt"),
        ("window", "of an attn_mask has the size"),
    ],
)
def test_what_cannot_be_symbolic_is_compiled_per_length(pools, name, reason):
    """What torch cannot do with symbols, and attention over another length."""
    for found, texts in pools[2].run(run_logged, name, (64, 32, 64), timeout=90):
        check([found], [0, 1, 0])
        assert texts and all(reason in text for text in texts), texts


def run_unlike_guards() -> list[tuple]:
    """As if a rank had a guard that the others have not."""
    from cpcompile import symbolic_tracing

    guards_on = symbolic_tracing.guards_on
    rank = torch.distributed.get_rank()
    different = mock.patch.object(
        symbolic_tracing, "guards_on", lambda x: f"{guards_on(x)} {rank}"
    )
    with different:
        return run("attention", "plain", "aot_eager", True, (64, 32, 64))


def test_ranks_with_unlike_guards_compile_per_length(pools):
    check(pools[2].run(run_unlike_guards), [0, 1, 0])
