"""A few queries over sharded keys: every rank has the result of one process.

The references are those of masked_cases.py and attention_cases.py, forward alone.
"""

from __future__ import annotations

import importlib
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cpcompile.ops.attention_spec import MASK_FIELDS
from tests.cpu.attention_cases import (
    AttentionCase,
    attend_in_one_process,
    lse_tolerance,
    make_inputs,
    sequence_mesh,
    tolerance,
)
from tests.cpu.masked_cases import MaskedCase, expected
from tests.cpu.masks import MASKS
from tests.cpu.on_ranks import on_ranks
from tests.support.attention_calls import attention
from tests.support.bounds import check, deviation
from tests.support.pairwise import selected_cases

# The package has the operator under the name of the module.
split_kv_attention = importlib.import_module(
    "cpcompile.ops.strategies.split_kv_attention"
)
AXES = {
    "mask": tuple(MASKS),
    "dtype": (torch.float32, torch.bfloat16, torch.float64),
    "world": (1, 2, 3, 4),
    "seq": (1, 2, 3),
    "kv_seq": (64, 67, 3, 2),  # of 3 and 2 some ranks hold none
    "kv_heads": (4, 2, 1),
}
UNMASKED = {
    "causal": (True, False),
    "dtype": (torch.float32, torch.bfloat16, torch.float64),
    "world": (1, 2, 3, 4),
    "seq": (1, 3),
    "kv_seq": (64, 67, 3, 2),
    "kv_heads": (4, 1),
}


def attend(
    operands: tuple[Tensor, Tensor, Tensor],
    masks: tuple[Tensor | None, ...],
    causal: bool,
    world: int,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as this rank has them; k and v are sharded, all else is whole."""
    mesh = sequence_mesh(world)

    def placed(x: Tensor | None, placement: Replicate | Shard) -> DTensor | None:
        if x is None:
            return None
        return distribute_tensor(x, mesh, [placement], src_data_rank=None)

    q, k, v = operands
    found = attention("split_kv")(
        placed(q, Replicate()),
        *(placed(x, Shard(2)) for x in (k, v)),
        q.shape[2],
        k.shape[2],
        causal,
        q.shape[3] ** -0.5,
        mesh.get_group().group_name,
        **{
            name: placed(x, Replicate())
            for name, x in zip(MASK_FIELDS, masks, strict=True)
        },
    )
    assert all(x.placements == (Replicate(),) for x in found)
    out, lse = (x.to_local() for x in found)
    return out, lse


def run_masked(case: MaskedCase) -> Tensor:
    mask = case.fields()
    fields = tuple(getattr(mask, name) for name in MASK_FIELDS)
    return attend(case.operands()[:3], fields, False, case.world)[0]


@pytest.mark.parametrize(
    "case", [MaskedCase(**values) for values in selected_cases(AXES)], ids=str
)
def test_under_a_mask(pools, case: MaskedCase) -> None:
    exact, rough, single = (
        expected(case, dtype)[0] for dtype in (torch.float64, case.dtype, torch.float32)
    )
    plain = (rough,) if case.dtype == torch.float64 else (rough, single)
    limit = max(tolerance(exact, one) for one in plain)
    ranks = pools[case.world].run(run_masked, case)
    for got in ranks:
        assert got.dtype == case.dtype
        assert torch.equal(got, ranks[0]), "the ranks have different bits"
        check([deviation("out", got, exact, limit=limit)])


@pytest.mark.parametrize(
    "case", [AttentionCase(**values) for values in selected_cases(UNMASKED)], ids=str
)
@on_ranks(lambda case: case.world)
def test_without_a_mask(case: AttentionCase) -> None:
    inputs, causal = make_inputs(case), case.causal
    exact = attend_in_one_process(inputs, causal, None, torch.float64)
    rough = attend_in_one_process(inputs, causal, None, case.dtype)
    out, lse = attend(make_inputs(case)[:3], (None,) * 4, case.causal, case.world)
    limit = tolerance(exact.out, rough.out)
    found = [deviation("out", out, exact.out, limit=limit)]
    q, k = (x.double() for x in inputs[:2])
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT
    scores = scores * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    whole = scores.logsumexp(-1)
    limit = lse_tolerance(case.dtype, whole, whole.float())
    found.append(deviation("lse", lse, whole, limit=limit))
    check(found)


@pytest.mark.parametrize("mask", ["window", "holes", "bias", "nothing"])
@on_ranks(2)
def test_keys_are_converted_in_parts(mask: str) -> None:
    """Plain math holds some keys in the accumulation dtype at a time."""
    case = MaskedCase(mask, dtype=torch.float64, seq=2, kv_seq=67, kv_heads=1)
    exact = expected(case, torch.float64)[0]
    with mock.patch.object(split_kv_attention, "HELD_ELEMENTS", 700):
        got = run_masked(case)
    check([deviation("out", got, exact, limit=tolerance(exact, exact))])


@pytest.mark.parametrize(
    ("lengths", "said"),
    [((2, 6), "needs 2 queries"), ((1, 8), "needs 4 keys")],
)
@on_ranks(2)
def test_operands_of_other_lengths(lengths, said) -> None:
    q, k = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 3, 4)
    group = sequence_mesh(2).get_group().group_name
    with pytest.raises(ValueError, match=said) as caught:
        attention("split_kv")(q, k, k, *lengths, False, 1.0, group)
    assert "got q (1, 2, 1, 4), k (1, 2, 3, 4)" in str(caught.value)
