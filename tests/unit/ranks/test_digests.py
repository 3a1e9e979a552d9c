"""Digests are equal where all bits are, and differ where a single one does."""

import pytest
import torch

from cpcompile.ranks.digests import (
    SAMPLED_ELEMENTS,
    digest,
    sample,
    value_text,
)

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64,
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
# Around the widths at which the way of summing changes: 8 bytes, one row, many rows.
SIZES = [0, 1, 7, 8, 1023, 1024, 8191, 8192, 8193, 70001]


def values(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers, most of which differ from their neighbours; bools in no order."""
    generator = torch.Generator().manual_seed(size)
    whole = torch.randint(0, 100, (size,), generator=generator)
    return (whole % 2 if dtype is torch.bool else whole).to(dtype)


# The sum depends on the bytes: each dtype has its own at one size, each size two.
CASES = [(8193, dtype) for dtype in DTYPES]
CASES += [(size, x) for size in SIZES for x in (torch.uint8, torch.complex64)]


@pytest.mark.parametrize(("size", "dtype"), dict.fromkeys(CASES), ids=str)
def test_every_single_element_counts(size, dtype):
    x = values(size, dtype)
    seen = {digest(x).item()}
    places = {0, size // 2, size - 1, size // 3} if size else set()
    for place in places:
        other = x.clone()
        other[place] = 1 - x[place].int() if dtype is torch.bool else x[place] + 1
        seen.add(digest(other).item())
    assert len(seen) == 1 + len(places)
    assert digest(x.clone()).item() in seen and digest(x).dtype is torch.int64


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(8193, dtype) for dtype in DTYPES] + [(16, torch.bool), (70001, torch.bfloat16)],
    ids=str,
)
def test_the_order_counts(size, dtype):
    x = values(size, dtype)
    seen = {digest(x).item()}
    others = [x.flip(0), x.roll(1), x.roll(1000), x.roll(8)]
    others = [other for other in others if not torch.equal(x, other)]
    seen |= {digest(other).item() for other in others}
    assert len(others) >= 3 and len(seen) >= 4


def test_bits_and_rows_count():
    zeros, nan = torch.zeros(4, requires_grad=True), torch.full((4,), float("nan"))
    assert digest(zeros).item() != digest(-zeros).item()
    assert digest(nan).item() == digest(nan.clone()).item()
    assert not digest(zeros).requires_grad
    x = values(64 * 2048, torch.int64).view(64, 2048)
    for other in (x[torch.randperm(64)], x.roll(1, 0)):
        assert digest(x).item() != digest(other).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_does_not_count(dtype):
    """Strides, offsets that no 8 bytes divide, conjugate and negative views."""
    x = values(48 * 50, dtype).view(48, 50)
    wanted = digest(x).item()
    transposed = x.t().contiguous().t()
    shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(48, 50)
    gaps = torch.stack([x, x], -1)[..., 0]
    assert not transposed.is_contiguous() and not gaps.is_contiguous()
    assert shifted.storage_offset() == 1
    for same in (transposed, shifted, gaps):
        assert digest(same).item() == wanted
    one = x[0, 0].expand(48, 50)
    assert digest(one).item() == digest(one.contiguous()).item()
    if dtype.is_complex:
        assert digest(x.conj()).item() == digest(x.conj().resolve_conj()).item()


@pytest.mark.parametrize("size", [0, 1, 2, 50])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_text_of_values_says_nothing_of_memory(dtype, size):
    """A vector of one element that is expanded counts as contiguous, with stride 0."""
    x = values(1, dtype).repeat(size)
    pairs = [(x[:1].expand(size) if size else x, x), (x, x.clone())]
    if dtype.is_complex:
        pairs.append((x.conj(), x.conj().resolve_conj()))
    for same, wanted in pairs:
        assert value_text(same) == value_text(wanted)


@pytest.mark.parametrize("shape", [(3, 5), (1, 2**18), (2**12, 2**6), (2**18,)])
def test_a_sample_is_small_and_goes_to_the_end(shape):
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    part = sample(x)
    assert part.numel() <= SAMPLED_ELEMENTS
    if x.numel() <= SAMPLED_ELEMENTS:
        assert part is x
    else:
        assert part.numel() > SAMPLED_ELEMENTS // 4
        assert part.max().item() > 0.98 * x.numel()
