"""Digests of tensors: whole numbers that are equal where all bits are equal.

All but `value_text` and `byte_vector` are computed on the tensor's device, in the order
of its elements, without waiting for the device. Equal digests of different tensors are
possible, and as likely as equal random numbers of 64 bits.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from cpcompile.torch_private.fake_tensors import is_traceable_wrapper_subclass

# Columns, of 8 bytes each, of the matrix as which a longer tensor is summed.
_COLUMNS = 1024

# The most elements that `sample` keeps.
SAMPLED_ELEMENTS = 2**16

# 2**64 divided by the golden ratio, as a signed number: its multiples are far apart.
_STRIDE = -0x61C8864680B583EB

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(x: Tensor) -> Tensor:
    """Digest all bits of x and their order into a 0-d int64 tensor.

    The bits of x, as integers, are the rows of a matrix. The sums of its rows and of
    its columns, weighted by odd numbers, change with every single element: no odd
    number takes a difference to 0 modulo 2**64. A tensor of a class of its own, as of
    quantised weights, has the bits of its parts.
    """
    if is_traceable_wrapper_subclass(x):
        names, _ = x.__tensor_flatten__()
        return digest(torch.stack([digest(getattr(x, name)) for name in names]))
    bits = _integers(x)
    rows = len(bits) // _COLUMNS
    matrix, rest = bits[: rows * _COLUMNS].view(rows, _COLUMNS), bits[rows * _COLUMNS :]
    result = _weighted(rest)
    if rows:
        # The weights of rows go on where the weights of columns end.
        result = result + _weighted(matrix.sum(0)) + _weighted(matrix.sum(1), _COLUMNS)
    return result


def value_text(x: Tensor) -> str:
    """Digest all bits of x into 12 hexadecimal digits; waits for the device."""
    return hashlib.sha256(byte_vector(x).numpy().data).hexdigest()[:12]


def byte_vector(x: Tensor) -> Tensor:
    """Return the bits of x as a vector of bytes on the CPU."""
    flat = x.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride() != (1,):  # also of one element, which counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def sample(x: Tensor) -> Tensor:
    """Return x, or every n-th slice along its longest dim if it has many elements."""
    if x.numel() <= SAMPLED_ELEMENTS or is_traceable_wrapper_subclass(x):
        return x
    dim = max(range(x.dim()), key=lambda d: x.shape[d])
    step = min(-(-x.numel() // SAMPLED_ELEMENTS), x.shape[dim])
    return x[(slice(None),) * dim + (slice(None, None, step),)]


def _integers(x: Tensor) -> Tensor:
    """Return the bits of x as a vector of integers, of 8 bytes where they fit."""
    x = x.detach().resolve_conj().resolve_neg()
    if x.is_complex():
        x = torch.view_as_real(x)
    flat = x.reshape(-1)
    if flat.stride() != (1,):  # a vector with gaps is a view of itself
        flat = flat.contiguous()
    if flat.numel() * x.itemsize % 8:
        return flat.view(_INTEGERS[x.itemsize])
    if flat.storage_offset() * x.itemsize % 8:  # the same digest, wherever x lies
        flat = flat.clone()
    return flat.view(torch.int64)


def _weighted(x: Tensor, first: int = 0) -> Tensor:
    """Sum the vector x, each element times an odd weight of its place."""
    places = torch.arange(first + 1, first + 1 + len(x), device=x.device)
    return (x * (places * _STRIDE | 1)).sum()
