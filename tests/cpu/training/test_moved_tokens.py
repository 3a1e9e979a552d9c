"""What slices, shifts, picks and joined sequences send: few tokens, and no gathers.

Against one process in float64. A profiler counts the bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile import config, logs
from cpcompile.accounting.graph_account import Kind
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import sequence_mesh
from tests.support.moved_programs import (
    CHANNELS,
    EXCHANGED,
    HEADS_OF,
    WORDS,
    ids_of,
    make,
)
from tests.support.profiled_messages import Messages, differences

WRITTEN = ("tokens written by row", "deeper tokens", "added tokens")
FEW = 24  # tokens that a rank receives in all exchanges together


def near(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Compare in float64; some gradients are 0 but for rounding."""
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        assert_close(got[name], x, rtol=1e-9, atol=1e-10, msg=lambda m: f"{name}: {m}")  # noqa: B023


def step(call: Any, model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    result = call(ids)
    result.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    found = {n: torch.zeros(()) if g is None else g.clone() for n, g in grads.items()}
    return {"result": result.detach()} | found


def run(
    name: str, world: int, batch: int, tokens: int, checkpoints: bool, options: Any
) -> dict[str, Any]:
    torch._dynamo.reset()
    logs.warn_once.cache_clear()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model, ids = make(name)(), ids_of(batch, tokens)
        if checkpoints:
            attend = model.attend
            model.attend = lambda *args, **given: checkpoint(
                attend, *args, use_reentrant=False, **given
            )
        wanted = step(model, model, ids)
        mesh = sequence_mesh(world)
        options = {"mesh": mesh, "inner": "aot_eager", "strategy": "ring", **options}
        compiled = torch.compile(model, backend="cp", options=options)
        with warnings() as texts, recording() as reports:
            got = step(compiled, model, ids)
        with Messages(world, mesh.get_rank()) as messages:
            step(compiled, model, ids)
    finally:
        torch.set_default_dtype(torch.float32)
    accounts = [account for report in reports for account in report.accounts]
    near(got, wanted)
    return {
        "warnings": texts,
        "gathers": messages.counts[Kind.ALL_GATHER],
        "gathered": messages.sizes[Kind.ALL_GATHER],
        "exchanged": messages.sizes[Kind.ALL_TO_ALL],
        "unlisted": differences(accounts, messages),
    }


def checked(
    results: list[dict[str, Any]], batch: int, width: int = WORDS, gathered: int = 0
) -> None:
    """gathered: how many tokens may be, which are written at other positions."""
    for found in results:
        assert found["warnings"] == []
        assert found["gathered"] <= gathered * batch * width * 8
        assert found["exchanged"] <= FEW * batch * width * 8
        assert found["unlisted"] == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    ("world", "batch", "tokens"), [(2, 2, 96), (3, 1, 95), (4, 2, 98)]
)
@pytest.mark.parametrize("name", HEADS_OF)
def test_few_tokens_travel(pools, name, world, batch, tokens, layout):
    """What attends backwards, or to every second token, brings them elsewhere.

    Of few tokens the steps of a draft are exchanged for channels, in fewer messages.
    """
    arguments = (name, world, batch, tokens, False, {"layout": layout})
    results = pools[world].run(run, *arguments, timeout=100)
    if name in ("backwards", "every second", "parts", "draft"):
        for found in results:
            assert found["gathers"] == 0 and found["unlisted"] == []
        return
    checked(results, batch, gathered=4 if name in WRITTEN else 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_draft_moves_few_of_many_tokens(pools, layout):
    arguments = ("draft", 2, 1, 2048, False, {"layout": layout})
    checked(pools[2].run(run, *arguments, timeout=100), 1)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", EXCHANGED)
def test_numbers_of_what_may_be_exchanged(pools, name):
    pools[2].run(run, name, 2, 1, 95, False, {}, timeout=100)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HEADS_OF)
def test_with_checkpoints(pools, name):
    pools[2].run(run, name, 2, 2, 95, True, {}, timeout=100)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", HEADS_OF)
def test_with_inductor(pools, name):
    options = {"inner": "inductor"}
    results = pools[2].run(run, name, 2, 1, 95, False, options, timeout=200)
    for found in results:
        assert found["gathers"] == 0 or name in WRITTEN


def tiles(name: str) -> list[tuple[str, int, bool]]:
    with config.patch(tile_least_megabytes=1e-3), recording() as reports:
        run(name, 2, 1, 96, False, {"tile": 8})
    found = [tile for report in reports for tile in report.tiles]
    return [(x.path, x.tile, x.gradients_at_once) for x in found]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", ["flat loss", "policy loss", "entropy"])
def test_losses_of_cut_logits_run_in_tiles(pools, name):
    """Whatever the gradient is that comes in: of a mean, or of each token."""
    for found in pools[2].run(tiles, name, timeout=80):
        assert ("logits", 8, True) in found


def lengths(name: str) -> int:
    """Make steps of several lengths; return how many graphs they took."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model = make(name)()
        options = {"mesh": sequence_mesh(2), "inner": "aot_eager"}
        compiled = torch.compile(model, backend="cp", options=options)
        for tokens in (48, 64, 96, 200, 132):
            ids = ids_of(2, tokens)
            got = step(compiled, model, ids)
            near(got, step(model, model, ids))
    finally:
        torch.set_default_dtype(torch.float32)
    return counters["stats"]["unique_graphs"]


SYMBOLIC = [
    "flat loss",
    "policy loss",
    "next tokens",
    "last logits",
    "last valid token",
    "middle token",
]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", SYMBOLIC)
def test_one_program_serves_many_lengths(pools, name):
    for graphs in pools[2].run(lengths, name, timeout=130):
        if name == "middle token":
            assert graphs == 5  # which token that is, is not proved for all lengths
        else:
            assert graphs == 2  # of the first length, and of all others


def given_laid_out(of_second: str) -> None:
    """A slice meets a second input of its length; both are given in layouts."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = sequence_mesh(3)
    x, z = (torch.randn(2, n, 16, dtype=torch.float64) for n in (40, 39))

    def model(x: Tensor, z: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        y = y.transpose(1, 2).flatten(2)
        return (y[:, 1:] * z * y[:, :-1].cos()).sin()

    leaves = [v.clone().requires_grad_() for v in (x, z)]
    wanted = model(*leaves)
    wanted.backward(torch.ones_like(wanted))
    grads = [leaf.grad for leaf in leaves]
    leaves = [v.clone().requires_grad_() for v in (x, z)]
    given = [
        cp.shard(v, mesh, 1, layout=layout)
        for v, layout in zip(leaves, ("zigzag", of_second), strict=True)
    ]
    compiled = torch.compile(model, backend="cp", options={"inner": "aot_eager"})
    result = cp.unshard(compiled(*given))
    assert_close(result.detach(), wanted.detach())
    result.backward(torch.ones_like(result))
    for leaf, grad in zip(leaves, grads, strict=True):
        assert_close(leaf.grad, grad)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("of_second", ["zigzag", "contiguous"])
def test_inputs_that_are_given_laid_out(pools, of_second):
    pools[3].run(given_laid_out, of_second, timeout=80)


def beyond() -> list[str]:
    """Errors of positions that a sequence has not, in one process and on ranks."""
    errors = []
    for call in (lambda x: x, cp_compiled()):
        model = make("chosen tokens")()
        model.head = lambda m, x, ids: x[torch.arange(2), ids[:, 0] + 90]
        try:
            call(model)(torch.full((2, 96), 10))
        except IndexError as error:
            errors.append(str(error))
    return errors


def cp_compiled() -> Any:
    options = {"mesh": sequence_mesh(2), "inner": "aot_eager"}
    return lambda model: torch.compile(model, backend="cp", options=options)


@pytest.mark.timeout(60)
def test_a_position_that_is_not_there_raises_as_in_torch(pools):
    for errors in pools[2].run(beyond, timeout=50):
        assert len(errors) == 2 and all("100" in text for text in errors)


def explained() -> list[tuple[str, str]]:
    options = {"mesh": sequence_mesh(2), "inner": "aot_eager", "strategy": "ring"}
    compiled = torch.compile(make("difference")(), backend="cp", options=options)
    explanation = cp.explain(compiled, ids_of(1, 96))
    (graph,) = explanation.graphs
    return [
        (exchange.purpose.value, exchange.kind.value)
        for account in graph.accounts
        for exchange in account.exchanges
        if exchange.kind is Kind.ALL_TO_ALL
    ]


@pytest.mark.timeout(60)
def test_explain_lists_what_neighbours_lend(pools):
    for rows in pools[2].run(explained, timeout=50):
        assert rows
        assert set(rows) == {("tokens of neighbours", "all-to-all")}


assert CHANNELS < WORDS  # a token of logits is the largest one that travels
