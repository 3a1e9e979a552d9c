"""The table of strategies, against the operators that it names."""

import functools

import pytest
import torch
from torch.distributed.tensor import DTensor

from cpcompile.cost.plans import Strategy
from cpcompile.cost.strategies import STRATEGIES
from cpcompile.geometry.layout import Layout
from cpcompile.ops.comm.communicating import communicates
from tests.support.attention_calls import attention, groups_of

COMMON = ["q", "k", "v", "extras", "sizes", "spec", "group"]


def test_every_strategy_has_a_row_of_its_own() -> None:
    assert list(STRATEGIES) == list(Strategy)
    assert len({row.look for row in STRATEGIES.values()}) == len(Strategy)


@pytest.mark.parametrize("strategy", Strategy, ids=lambda each: each.value)
def test_operators_take_what_the_table_says(strategy: Strategy) -> None:
    row = STRATEGIES[strategy]
    schema = getattr(torch.ops.cp, row.operator).default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[: len(COMMON)] == COMMON
    assert len(schema.returns) == 2  # out and the log-sum-exp
    assert set(row.masked_layouts) <= set(row.layouts)
    assert row.layouts[0] is Layout.CONTIGUOUS
    # They have a sharding rule, or are made of what has one.
    op = getattr(torch.ops.cp, STRATEGIES[strategy].operator).default
    rules = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    assert op in rules or op.has_kernel_for_dispatch_key(composite)


@pytest.mark.parametrize("layout", Layout, ids=str)
@pytest.mark.parametrize("strategy", Strategy, ids=lambda each: each.value)
def test_operators_take_the_layouts_of_the_table(
    one_rank: str, strategy: Strategy, layout: Layout
) -> None:
    row, x = STRATEGIES[strategy], torch.zeros(1, 1, 4, 8)
    groups = groups_of(strategy.value, one_rank)
    given = (4, 4, not row.few_queries, 1.0, *groups)
    op = attention(row.operator.removesuffix("_attention"))
    call = functools.partial(op, x, x, x, *given, whole_keys=row.of_latents)
    if layout in row.layouts:
        assert call(layout=layout.value)[0].shape == x.shape
    else:
        with pytest.raises(ValueError, match=f"got layout={layout.value!r}"):
            call(layout=layout.value)


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
        "dim_exchange",
        "moved_tokens",
        "moved_tokens_backward",
        "passed_states",
        "passed_states_backward",
        "relayout",
        "ring_attention",
        "ring_attention_backward",
        "ring_shift",
        "split_kv_attention",
        "ulysses_gather",
        "ulysses_gather_finish",
        "ulysses_gather_start",
        "ulysses_scatter",
        "ulysses_scatter_finish",
        "ulysses_scatter_start",
    }
    assert not communicates(torch.ops.aten.mm.default)
    assert not communicates("mm")
