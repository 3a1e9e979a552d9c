"""Sizes that may be symbols: what is known of them, and what becomes a guard."""

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from cpcompile.geometry.lengths import (
    expected,
    guard_region,
    guards_on,
    hashable,
    in_chunks,
    is_divided,
    is_fixed,
    is_same,
    is_symbol,
    require,
)


@pytest.fixture
def length() -> torch.SymInt:
    """A length that is 64 in this call."""
    environment = ShapeEnv()
    source = ConstantSource("length")
    symbol = environment.create_symbol(64, source, DimDynamic.DYNAMIC)
    return environment.create_symintnode(symbol, hint=64, source=source)


def test_facts_without_a_guard(length):
    assert is_symbol(length) and not is_symbol(64)
    assert expected(length) == expected(64) == 64
    assert is_same(length * 2, length + length) and is_same(64, 64)
    assert not is_same(length, 64)  # in this call only
    assert not is_divided(length, 2) and is_divided(64, 2)
    assert hashable(length + 1) == hashable(1 + length) and hashable(3) == 3
    assert guards_on(length) == guards_on(length) and "64" not in guards_on(length)
    assert not is_fixed(length, 2)
    # As for DTensors, where the local length is the symbol.
    whole = length * 2
    guard_region(whole, 16, 1000)
    assert expected(whole) == 128 and not is_fixed(whole, 2)
    assert in_chunks(whole, length, 2) == whole
    assert in_chunks(7, 4, 2) == 7  # uneven chunks
    require(length == 64)
    assert is_fixed(whole, 2)


def test_what_is_required_of_a_length(length):
    require(length % 4 == 0)
    assert is_divided(length, 4) and is_divided(length // 4 * 8, 4)
    assert "Mod" in guards_on(length)
    # Rank 2 of 4 asks where a slice ends, and rank 0 does not.
    require(length % 4 == 0)
    before = guards_on(length)
    require(2 * (length // 4) < 4 * (length // 4))
    assert guards_on(length) == before
    require(length // 4 < 100)
    assert guards_on(length) != before
    with pytest.raises(AssertionError, match="does not hold for the length"):
        require(length % 3 == 0)


def test_a_region_and_a_number(length):
    guard_region(length, 16, 128)
    guard_region(length, 2, None)
    assert "VR[16, 127]" in guards_on(length)
    assert not is_fixed(length, 2)
    guard_region(length, 64, 66)
    assert is_fixed(length, 2) and not is_fixed(length, 1)
    assert int(length) == 64
    assert not is_symbol(length) and is_fixed(length, 2)
