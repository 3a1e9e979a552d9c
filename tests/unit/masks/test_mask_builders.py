"""What is read of masks, in the many forms in which they are built: it is exact."""

import pytest
import torch
import torch.nn.functional as F

import tests.unit.masks.mask_builders as b
from cpcompile.passes.model.masks import unread_masks
from tests.unit.masks.mask_cases import attend, check, check_read, operands, read

S = 21


def inputs(name: str, seed: int, keys: int = S) -> torch.Tensor:
    """Random data of one kind, for a batch of two."""
    g = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g)

    if name == "attention_mask":  # holes, and rows without anything on the left
        mask = (integers(0, 4, 2, keys) > 0).long()
        mask[seed % 2, : int(integers(0, keys, 1))] = 0
        return mask
    if name == "position_ids":  # documents that start anywhere
        rows = []
        for _ in range(2):
            row: list[int] = []
            while len(row) < keys:
                start = int(integers(0, 3, 1))
                row += range(start, start + int(integers(1, 9, 1)))
            rows.append(row[:keys])
        return torch.tensor(rows)
    if name == "lengths":
        return integers(-2, keys + 3, 2)
    if name in ("weight", "bias"):
        shape = (8, 2) if name == "weight" else (1, keys, keys)
        return torch.randn(shape, generator=g)
    if name == "pairs":
        return integers(0, 2, 2, 1, keys, keys) > 0
    assert name == "numbers", name
    return integers(-2, 3, 2, keys)


# builder, its inputs, what it is called
STATIC = [
    (b.causal, "is_causal"),
    (b.causal_tril, "is_causal"),
    (b.causal_triu, "is_causal"),
    (b.causal_lowest, "is_causal"),
    (b.causal_aligned_right, "is_causal"),
    (b.everything, "none"),
    (b.banded, "key ranges"),
    (b.shifted, "causal, shifted by 1"),
    (b.nothing, "key ranges"),
    (b.window, "causal, window 8"),
    (b.both_sides, "window of 4 to each side"),
    (b.chunks, "causal, chunks of 8"),
    (b.sinks, "causal, dense bool [21, 21]"),
    (b.static_documents, "equal ids"),
    (b.packed_without_inputs, "is_causal"),
    (b.vmap_causal, "is_causal"),
    (b.in_place_window, "causal, window 8"),
    (b.in_place_fill, "is_causal"),
    (b.in_place_through_a_view, "key ranges"),
    (b.alibi, "causal, bias by distance"),
]
FROM_DATA = [
    (b.packed_by_broadcast, ["position_ids"], "causal, same document"),
    (b.packed_windows, ["position_ids"], "causal, window 5, same document"),
    (b.packed_chunks, ["position_ids"], "causal, same document, equal ids"),
    (b.padded_by_broadcast, ["attention_mask"], "causal, key padding"),
    (b.vmap_padded, ["attention_mask"], "causal, key padding"),
    (b.chunks_after_padding, ["attention_mask"], "causal, equal ids, key padding"),
    (b.in_place_padded, ["attention_mask"], "dense float32 [2, 1, 21, 21]"),
    (b.padding, ["attention_mask"], "key padding"),
    (b.padding_of_numbers, ["attention_mask"], "key padding"),
    (b.pairs_of_padding, ["attention_mask"], "key ranges from data, key padding"),
    (b.causal_padding_lowest, ["attention_mask"], "dense float32 [2, 1, 21, 21]"),
    (b.documents, ["numbers"], "causal, same document"),
    (b.documents_and_padding, ["numbers", "attention_mask"], None),
    (b.two_equalities, ["numbers", "attention_mask"], "same document"),
    (b.prefix, ["lengths"], "key ranges from data"),
    (b.prefix_of_pairs, ["lengths"], "key ranges from data"),
    (b.lengths_of_keys, ["lengths"], "key ranges from data"),
    (b.length_of_all, ["lengths"], "key ranges from data"),
    (b.lowest_twice, ["attention_mask"], "dense float32 [2, 1, 21, 21]"),
    (b.blocks, ["numbers"], "dense bool [2, 1, 21, 21]"),
    (b.relative, ["weight"], "bias by distance"),
]


@pytest.mark.parametrize(
    ("builder", "name"), STATIC, ids=[x[0].__name__ for x in STATIC]
)
def test_masks_without_data(builder, name):
    q, k = operands(S)
    check_read(attend(builder), name, q, k)


@pytest.mark.parametrize(
    ("builder", "kinds", "name"), FROM_DATA, ids=[x[0].__name__ for x in FROM_DATA]
)
def test_masks_from_data(builder, kinds, name):
    """One reading has to hold for whatever data comes."""
    q, k = operands(S)
    found = read(attend(builder), q, k, *(inputs(x, 0) for x in kinds))
    assert found.text == (name or "same document, key padding")
    for seed in range(8):
        check(found, q, k, *(inputs(x, seed) for x in kinds))


@pytest.mark.parametrize("builder", [b.window, b.both_sides, b.chunks, b.causal])
@pytest.mark.parametrize("lengths", [(13, 29), (29, 13), (1, 7), (7, 1), (1, 1)])
def test_other_keys_than_queries(builder, lengths):
    q, k = operands(*lengths)
    found = read(attend(builder), q, k)
    assert found.masks[0] is None or found.masks[0].bias is None
    assert not found.calls[0].is_causal or lengths[0] == lengths[1]
    check(found, q, k)


DENSE = [
    *[(S, S), (1, S, S), (1, 1, S, S), (2, 1, S, S)],
    *[(2, 2, S, S), (1, 2, S, S), (1, S)],
]


@pytest.mark.parametrize("shape", DENSE, ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
def test_given_masks(shape, dtype):
    q, k = operands(S)
    mask = torch.randn(shape) > 0 if dtype == torch.bool else torch.randn(shape)
    found = read(attend(b.given), q, k, mask)
    of_keys = "key padding" if dtype == torch.bool else "bias by key"
    dense = f"dense {str(dtype).removeprefix('torch.')} {list(shape)}"
    assert found.text == (of_keys if shape[-2] == 1 else dense)
    check(found, q, k, mask)


def lowest_half(q, k):
    """-65504 is not so low that no score makes up for it: a bias."""
    return torch.where(b.causal(q, k), 0.0, -65504.0).to(torch.float16)


def added_bool(q, k, visible):
    """1 and 0, which are added; it hides nothing."""
    return torch.where(b.causal(q, k), visible[:, None, None, :].float(), -1e4)


@pytest.mark.parametrize(
    ("builder", "sizes", "data", "text"),
    [
        (lowest_half, (S,), [], "dense float16 [21, 21]"),
        (added_bool, (S,), ["attention_mask"], "dense float32 [2, 1, 21, 21]"),
        (b.given_and_causal, (S,), ["pairs"], "causal, dense bool [2, 1, 21, 21]"),
        (b.padded_bias, (S,), ["bias"], "dense float32 [2, 21, 21]"),
        (b.padding, (13, 29), ["attention_mask"], "key padding"),
    ],
)
def test_what_is_a_tensor(builder, sizes, data, text):
    q, k = operands(*sizes)
    if builder is lowest_half:
        q, k = q.half(), k.half()
    found = read(attend(builder), q, k, *(inputs(x, 0, sizes[-1]) for x in data))
    assert found.text == text
    for seed in range(8):
        check(found, q, k, *(inputs(x, seed, sizes[-1]) for x in data))


def test_three_dimensions():
    """q [batch, tokens, dim]: the first dimension of a mask is the batch."""
    q, k = (x[:, 0] for x in operands(S))
    for builder, data in (
        (b.causal, []),
        (lambda q, k, n: n[:, :, None] == n[:, None, :], [inputs("numbers", 1)]),
        (b.given, [torch.randn(2, S, S)]),
        (b.given, [torch.randn(S, S) > 0]),
    ):
        found = read(attend(builder), q, k, *data)
        check(found, q, k, *data)


def test_rows_whose_number_no_key_has():
    """Even, odd and negative numbers of rows against even ones of keys."""

    def mask_of(q, k, rows, columns):
        return rows[:, None, :, None] == columns[:, None, None, :]

    q, k = operands(13, S)
    rows = [inputs("numbers", seed, 13) * 3 for seed in range(6)]
    columns = [inputs("numbers", seed + 9) * 2 for seed in range(6)]
    found = read(attend(mask_of), q, k, rows[0], columns[0])
    assert found.text == "equal ids"
    for each in zip(rows, columns, strict=True):
        check(found, q, k, *each)


def steps(positions):
    return torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)


def windowed(documents_of, positions_of=lambda p, o: p):
    """A window of three positions, within documents."""

    def mask_of(q, k, positions, others):
        documents = documents_of(positions, others)
        at = positions_of(positions, others)
        same = documents[:, None, :, None] == documents[:, None, None, :]
        i, j = at[:, None, :, None], at[:, None, None, :]
        return same & (j <= i) & (j > i - 3)

    return attend(mask_of)


NEAR = {
    "steps of 2": windowed(lambda p, o: (steps(p) != 2).cumsum(-1)),
    "steps down": windowed(lambda p, o: (steps(p) != -1).cumsum(-1)),
    "equal steps": windowed(lambda p, o: (steps(p) == 1).cumsum(-1)),
    "larger steps": windowed(lambda p, o: (steps(p) > 1).cumsum(-1)),
    "a counter of 8 bits": windowed(
        lambda p, o: (steps(p) != 1).cumsum(-1, dtype=torch.int8).long()
    ),
    "steps of others": windowed(lambda p, o: (steps(o) != 1).cumsum(-1)),
    "positions of others": windowed(
        lambda p, o: (steps(p) != 1).cumsum(-1), lambda p, o: o
    ),
    "doubled positions": windowed(
        lambda p, o: (steps(p) != 1).cumsum(-1), lambda p, o: 2 * p
    ),
    "steps of two": windowed(
        lambda p, o: (
            torch.cat([p[:, :2], p], 1)[:, 2:] - torch.cat([p[:, :2], p], 1)[:, :-2]
            != 1
        ).cumsum(-1)
    ),
    "steps in the batch": windowed(
        lambda p, o: (torch.diff(p, prepend=p[:1] - 1, dim=0) != 1).cumsum(0)
    ),
    "other batch": windowed(lambda p, o: (steps(p) != 1).cumsum(-1).flip(0)),
}
EXACT = {
    "as it is": windowed(lambda p, o: (steps(p) != 1).cumsum(-1)),
    "moved": windowed(lambda p, o: (steps(p) != 1).cumsum(-1), lambda p, o: p + 7),
}


def data(seed):
    g = torch.Generator().manual_seed(seed)
    steps = torch.tensor([1, 1, 1, 2, 2, -1, 0, -5])
    walks = steps[torch.randint(0, len(steps), (2, 2, S), generator=g)].cumsum(-1)
    return tuple(walks)


@pytest.mark.parametrize("name", [*NEAR, *EXACT])
def test_what_looks_alike_is_not_taken_for_it(name):
    q, k = operands(S)
    found = read((NEAR | EXACT)[name], q, k, *data(0))
    if name in EXACT:
        assert found.text == "causal, window 3, same document"
    else:
        assert found.masks[0] is not None and found.masks[0].bias is not None
    for seed in range(12):
        check(found, q, k, *data(seed))


def of_some_rows(q, k):
    """A causal mask of data: what is made of it is no constant."""
    return b.causal(q, k) & (q[..., :1] > -9)


UNREAD = {
    "matmul": lambda q, k: (q @ k.transpose(-1, -2)) > 0,
    "cumsum over pairs": lambda q, k: of_some_rows(q, k).cumsum(-1) > 3,
    "roll": lambda q, k: of_some_rows(q, k).roll(1, -1),
    "sort": lambda q, k: b.alibi(q, k).sort(-1).values,
    "random": lambda q, k: torch.rand(S, S) > 0.5,
    "merged": lambda q, k: torch.arange(S * S).view(S, S) % 7 > 2,
    "all of a row": lambda q, k: (
        of_some_rows(q, k).all(-1, keepdim=True)
        | b.blocks(q, k, torch.arange(S).expand(2, -1))
    ),
    "sums of keys": lambda q, k: (q @ k.mT).sum(-2, keepdim=True),
    "after attention": lambda q, k: F.scaled_dot_product_attention(q, k, k) @ k.mT > 0,
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", UNREAD)
def test_what_is_computed_for_all_pairs_is_a_bias(case, strict, caplog):
    q, k = operands(S)
    found = read(attend(UNREAD[case]), q, k, strict=strict)
    call, mask = found.calls[-1], found.masks[-1]
    assert call.unsupported is None
    assert mask.unread is not None and mask.unread.reason
    assert mask.text.startswith("dense ")
    value = call.mask.meta["example_value"]
    assert mask.unread.bytes == value.nbytes and not mask.unread.is_large
    assert [r.getMessage() for r in caplog.records if "attn_mask" in r.msg] == []
    if case != "random":
        check(found, q, k)


def test_what_is_large(monkeypatch):
    """The least limit counts where a share of the operands is less."""
    q, k = operands(S)
    held = 4 * 4 * (2 * 2 * S * 4)  # bytes of q, k, v and the result
    size = 2 * 2 * S * S  # of a bool mask with heads

    def is_large(least, share):
        monkeypatch.setattr(unread_masks, "LEAST_LIMIT", least)
        found = read(attend(UNREAD["matmul"]), q, k, whole_mask_share=share)
        unread = found.masks[0].unread
        return unread.is_large

    assert not is_large(size, 0.0)
    assert is_large(size - 1, 0.0)
    assert not is_large(0, size / held)
    assert is_large(0, (size - 1) / held)


@pytest.mark.parametrize(
    ("mask", "error"),
    [
        (torch.ones(S, S + 1, dtype=torch.bool), r"expanded size|broadcast"),
        (torch.ones(S, S, dtype=torch.int64), "attn_mask dtype"),
    ],
)
def test_a_wrong_mask_is_an_error_of_torch(mask, error):
    with pytest.raises(Exception, match=error):
        read(attend(b.given), *operands(S), mask)
