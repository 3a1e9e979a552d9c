"""Whole sequences, equal on every rank, in every layout."""

import torch

from cpcompile.geometry.layout import TokenLayout


def permuted(whole, dim, layout, ranks):
    """The whole sequence in `layout`."""
    tokens = TokenLayout.of(layout, whole.shape[dim], ranks)
    return whole.index_select(dim, tokens.permutation())


def normal(shape, dtype=torch.float64, seed=0):
    """Equal on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
