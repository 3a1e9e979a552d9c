"""Static caches of keys and values, spread over the ranks of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, zeros

from cpcompile.errors import InputError

Cache = TypeVar("Cache")

TOKENS = 2  # of keys [B, G, tokens, D]


def shard_cache(cache: Cache, mesh: DeviceMesh) -> Cache:
    """Let each rank keep its part of the tokens of a static key/value cache.

        cache = StaticCache(config=model.config, max_cache_len=131072)
        cache.early_initialization(1, kv_heads, head_dim, dtype, device="meta")
        model.generate(ids, past_key_values=cp.shard_cache(cache, mesh["cp"]))

    The model has to be compiled with backend "cp": what it writes goes to the rank
    whose part it is, and every rank attends to its own part (docs/howto/generate.md).

    Args:
        cache: a cache of transformers, or an object with `layers` as it has, whose
            `keys` and `values` [B, G, tokens, D] exist. On the device "meta" they take
            no memory yet; the parts are zeros then. On other devices they are cut, and
            every rank must have the same. Layers of a sliding window are small, and
            stay as they are: on "meta" they become zeros.
        mesh: a mesh of one axis.

    Returns: the same object. Its keys and values are DTensors with Shard(2).

    Raises: InputError for a mesh of several axes, and layers without keys.
    """
    if mesh.ndim != 1:
        raise InputError(
            f"cp.shard_cache: got a mesh of the axes {mesh.mesh_dim_names}; needed the "
            'one that shards the sequence: mesh["cp"]'
        )
    layers: Sequence[Any] | None = getattr(cache, "layers", None)
    if not layers:
        raise InputError(
            f"cp.shard_cache: got {type(cache).__name__}; needed a static cache with "
            "`layers`, each with `keys` and `values`; tensors of your own are sharded "
            "by torch.distributed.tensor.zeros(..., placements=[Shard(2)])"
        )
    device = torch.device(mesh.device_type)
    for number, layer in enumerate(layers):
        for name in ("keys", "values"):
            _check(number, name, getattr(layer, name, None))
        sharded = not getattr(layer, "is_sliding", False)
        for name in ("keys", "values"):
            setattr(layer, name, _placed(getattr(layer, name), mesh, sharded))
        if hasattr(layer, "device"):
            layer.device = device
        length = getattr(layer, "cumulative_length", None)
        if isinstance(length, Tensor):
            layer.cumulative_length = _placed(length, mesh, False)
    return cache


def _check(number: int, name: str, x: Any) -> None:
    if isinstance(x, DTensor):
        raise InputError(
            f"cp.shard_cache: {name} of layer {number} are a DTensor already; needed a "
            "cache that is sharded once"
        )
    if not isinstance(x, Tensor) or x.ndim != 4:
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(
            f"cp.shard_cache: {name} of layer {number} are {got}; needed a tensor "
            "[batch, heads, tokens, dim] of fixed length: a StaticCache after "
            "early_initialization(batch_size, num_heads, head_dim, dtype, device)"
        )


def _placed(x: Tensor, mesh: DeviceMesh, sharded: bool) -> Tensor:
    device = torch.device(mesh.device_type)
    if not sharded:
        if x.is_meta:
            return torch.zeros(x.shape, dtype=x.dtype, device=device)
        return x.to(device)
    placements = [Shard(TOKENS)]
    if x.is_meta:
        return zeros(x.shape, dtype=x.dtype, device_mesh=mesh, placements=placements)
    return distribute_tensor(x, mesh, placements, src_data_rank=None)
