"""The table of strategies, against the operators that it names."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

import cpcompile.ops  # noqa: F401  (registers the operators)
from cpcompile.cost.plans import Strategy
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.geometry.layout import Layout
from cpcompile.ops.comm.communicating import communicates

COMMON = ["q", "k", "v", "q_len", "kv_len", "is_causal", "scale", "group"]


def test_every_strategy_has_a_row_of_its_own() -> None:
    assert list(STRATEGIES) == list(Strategy)
    styles = {(row.color, row.marker, row.line) for row in STRATEGIES.values()}
    assert len(styles) == len(Strategy)


@pytest.mark.parametrize("strategy", Strategy, ids=lambda each: each.value)
def test_operators_take_what_the_table_says(strategy: Strategy) -> None:
    row = STRATEGIES[strategy]
    schema = getattr(torch.ops.cp, row.operator).default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[: len(COMMON)] == COMMON
    assert set(row.masked_layouts) <= set(row.layouts)
    assert row.layouts[0] is Layout.CONTIGUOUS
    assert ("layout" in names) == (len(row.layouts) > 1)


@pytest.mark.parametrize("strategy", Strategy, ids=lambda each: each.value)
def test_operators_run_on_dtensors(strategy: Strategy) -> None:
    """They have a sharding rule, or are made of what has one."""
    op = getattr(torch.ops.cp, STRATEGIES[strategy].operator).default
    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    assert op in rules or op.has_kernel_for_dispatch_key(composite)


def test_operators_that_send_are_known_by_their_schemas() -> None:
    """A forgotten one could change places with an all-reduce on one rank only."""
    found = {
        name.removeprefix("cp::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("cp::")
        and communicates(getattr(torch.ops.cp, name.removeprefix("cp::")).default)
    }
    assert found == {
        "all_gather_attention",
        "all_gather_attention_backward",
        "halo_exchange",
        "halo_exchange_backward",
        "relayout",
        "ring_attention",
        "ring_attention_backward",
        "ring_shift",
        "split_kv_attention",
        "ulysses_gather",
        "ulysses_scatter",
    }
    assert not communicates(torch.ops.aten.mm.default)
    assert not communicates("mm")
