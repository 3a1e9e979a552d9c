"""One reading of a mask serves all lengths, or the graph is compiled per length."""

from functools import partial

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import tests.unit.masks.mask_builders as b
from cpcompile.geometry.layout import Layout
from cpcompile.geometry.lengths import LengthNotSymbolic, guards_on
from cpcompile.passes.model.masks.mask_work import mask_work
from tests.unit.masks import mask_cases
from tests.unit.masks.mask_cases import attend, check, operands

S = 16  # the length that is compiled; those that follow are shorter and longer
OTHERS = (12, 40, 9)


read = partial(mask_cases.read, dynamic=True)


def inputs_of(data: str, seq: int) -> tuple[torch.Tensor, ...]:
    q, _ = operands(seq)
    generator = torch.Generator().manual_seed(seq)
    if data == "attention_mask":
        given = torch.rand(2, seq, generator=generator) < 0.7
        given[:, 0] = True
    elif data == "position_ids":
        given = torch.arange(seq).repeat(2, 1)
        given[1] %= seq // 3 + 1
    elif data == "lengths":
        given = torch.tensor([seq // 2, 1])
    else:
        return q, q
    return q, q, given


def long_window(q, k):
    """Wider than the length that is compiled, where it is merely causal."""
    return b.window(q, k, width=20)


def long_chunks(q, k):
    i, j = b.tokens(q, k)
    return (j // 24 == i // 24) & (j <= i)


def of_tensors(q, k):
    """As causal, with positions that are cut and padded."""
    positions = torch.cat([torch.tensor([-1]), torch.arange(q.shape[-2])])[1:]
    return positions[None, :] <= positions[:, None]


READ = [
    (b.causal, "", "is_causal"),
    (b.causal_tril, "", "is_causal"),
    (b.causal_lowest, "", "is_causal"),
    (b.vmap_causal, "", "is_causal"),
    (b.packed_without_inputs, "", "is_causal"),
    (b.everything, "", "none"),
    (of_tensors, "", "is_causal"),
    (b.window, "", "causal, window 8"),
    (long_window, "", "causal, window 20"),
    (long_chunks, "", "causal, chunks of 24"),
    (b.both_sides, "", "window of 4 to each side"),
    (b.padded_by_broadcast, "attention_mask", "causal, key padding"),
    (b.vmap_padded, "attention_mask", "causal, key padding"),
    (b.packed_by_broadcast, "position_ids", "causal, same document"),
    (b.packed_windows, "position_ids", "causal, window 5, same document"),
    (b.prefix, "lengths", "key ranges from data"),
]


@pytest.mark.parametrize(
    ("builder", "data", "text"), READ, ids=lambda x: getattr(x, "__name__", None)
)
def test_one_reading_for_all_lengths(builder, data, text):
    """`read` fails where Dynamo traces again."""
    found = read(attend(builder), *inputs_of(data, S))
    assert found.text == text
    for seq in OTHERS:
        check(found, *inputs_of(data, seq))


def test_tables_and_plans():
    found = read(attend(b.static_documents), *inputs_of("", S))
    assert found.text == "equal ids" and "VR[2, 29]" in guards_on(found.ctx.length)
    for seq in (12, 29):
        check(found, *inputs_of("", seq))
    found = read(attend(b.causal), *inputs_of("", S))
    assert "VR[2, 131101]" in guards_on(found.ctx.length)
    found = read(attend(b.window), *inputs_of("", S))
    (mask,) = found.masks
    work = mask_work(mask, S, S, 2, Layout.CONTIGUOUS)
    pairs = sum(min(i + 1, 8) for i in range(S))
    assert work.mean_live_fraction == pairs / S**2


def flipped(q, k):
    return b.causal(q, k).flip(0, 1)


def last_tokens(q, k):
    """All see the last three keys."""
    i, j = b.tokens(q, k)
    return (j <= i) | (j >= k.shape[-2] - 3)


def last_but_one(q, k):
    """As long as it should be by a number that counts from the end."""
    i = torch.arange(q.shape[-2] + 1)[-q.shape[-2] - 1 : -1][:, None]
    return torch.arange(k.shape[-2]) <= i


def rows_by_number(q, k):
    """How many tokens there are is a value."""
    i, j = b.tokens(q, k)
    return (j <= i) & (i < torch.full((), q.shape[-2]) - 2) | (j == i)


def longest_row(q, k):
    """A maximum over the tokens, which is another for another length."""
    i, j = b.tokens(q, k)
    return (j <= i) | (j == i.amax())


def dense(q, k, attention_mask):
    i, j = b.tokens(q, k)
    return torch.where(j <= i, attention_mask[:, None, None, :].float(), -1e4)


@pytest.mark.parametrize(
    ("builder", "data", "why"),
    [
        (flipped, "", "may depend on more than its end"),
        (last_tokens, "", "may depend on more than its end"),
        (last_but_one, "", "may depend on more than its end"),
        (rows_by_number, "", "may depend on more than its end"),
        (longest_row, "", "may depend on more than its end"),
        (dense, "attention_mask", "a bias of pairs is added"),
    ],
)
def test_what_depends_on_the_length_is_compiled_per_length(builder, data, why):
    with pytest.raises(BackendCompilerFailed, match=why) as error:
        read(attend(builder), *inputs_of(data, S))
    assert isinstance(error.value.inner_exception, LengthNotSymbolic)
