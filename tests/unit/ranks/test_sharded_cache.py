"""Static caches, by objects that are made as those of transformers are."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import cpcompile as cp
from cpcompile.errors import InputError
from tests.golden.capture import fake_mesh

MESH_AXES = {"cp": 2}
SHAPE = (1, 2, 5, 4)


def layer(device="cpu", **changes):
    fields = {
        "keys": torch.ones(SHAPE, device=device),
        "values": torch.ones(SHAPE, dtype=torch.bfloat16, device=device),
        "device": torch.device(device),
        "cumulative_length": torch.zeros((), dtype=torch.int64, device=device),
    }
    return SimpleNamespace(**(fields | changes))


@pytest.mark.parametrize(("device", "filled"), [("cpu", 1.0), ("meta", 0.0)])
def test_each_rank_keeps_its_part(mesh, device, filled):
    cache = SimpleNamespace(layers=[layer(device), layer(device, is_sliding=True)])
    assert cp.shard_cache(cache, mesh) is cache
    full, window = cache.layers
    for x, dtype in ((full.keys, torch.float32), (full.values, torch.bfloat16)):
        assert isinstance(x, DTensor) and x.placements == (Shard(2),)
        assert x.shape == SHAPE and x.dtype == dtype
        assert x.to_local().shape == (1, 2, 2, 4)  # 3 of 5 tokens are rank 0's
        assert bool((x.to_local() == filled).all())
    for each in (full, window):
        assert each.device == torch.device("cpu")
        assert each.cumulative_length.device == torch.device("cpu")
        assert int(each.cumulative_length) == 0
    assert not isinstance(window.keys, DTensor)
    assert bool((window.keys == filled).all()) and window.keys.shape == SHAPE


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (SimpleNamespace(), "got SimpleNamespace; needed a static cache"),
        (SimpleNamespace(layers=[layer(keys=None)]), "keys of layer 0 are NoneType"),
        (
            SimpleNamespace(layers=[layer(), layer(values=torch.zeros(2, 3))]),
            r"values of layer 1 are \[2, 3\]; needed .* early_initialization",
        ),
    ],
)
def test_what_is_no_static_cache(mesh, cache, said):
    with pytest.raises(InputError, match=said):
        cp.shard_cache(cache, mesh)
    cache = SimpleNamespace(layers=[layer()])
    refused = pytest.raises(InputError, match=r"the axes \('dp', 'cp'\); needed")
    with fake_mesh(2, 2, names=("dp", "cp")) as several, refused:
        cp.shard_cache(cache, several)
    cp.shard_cache(cache, mesh)
    with pytest.raises(InputError, match="keys of layer 0 are a DTensor already"):
        cp.shard_cache(cache, mesh)
