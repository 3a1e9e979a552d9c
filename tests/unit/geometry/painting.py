"""Draws blocks of scores into a table of (query, key) pairs."""

import torch


def painted(blocks, rows, keys):
    """How many blocks compute each pair, int64 [rows, keys]."""
    counts = torch.zeros(rows, keys, dtype=torch.int64)
    for b in blocks:
        part = counts[b.row :: b.step, b.key :: b.step][: b.rows, : b.keys]
        ones = torch.ones(b.rows, b.keys, dtype=torch.int64)
        part += ones.tril() if b.triangular else ones
    return counts
