"""What the torch of this run does otherwise than others, found by asking it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


@functools.cache
def refuses_two_masks() -> bool:
    """Whether attention with a mask and is_causal raises by itself, as in 2.15."""
    x = torch.zeros(1, 1, 2, 1)
    mask = torch.ones(2, 2, dtype=torch.bool)
    try:
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=True)
    except RuntimeError:
        return True
    return False


needs_two_masks = pytest.mark.skipif(
    refuses_two_masks(),
    reason=f"torch {torch.__version__} refuses attn_mask beside is_causal itself",
)


def skip_if_combined(call: Callable[[Tensor], Tensor], mesh: DeviceMesh) -> None:
    """Skip where DTensor combines the parts inside of `call`, as in 2.15.

    call: on a tensor [2, 16] whose dimension 1 is sharded.
    """
    local = torch.ones(2, 16 // mesh.size())
    result = call(DTensor.from_local(local, mesh, [Shard(1)], run_check=False))
    assert isinstance(result, DTensor)
    if not any(p.is_partial() for p in result.placements):
        pytest.skip(f"torch {torch.__version__} combines the parts itself")


@contextmanager
def skip_if_cudnn_is_asked() -> Iterator[None]:
    """Attention on a fake GPU; a build for CUDA loads no cuDNN where there is none."""
    try:
        yield
    except Exception as error:
        if "Cannot query cuDNN version" not in str(error):
            raise
        pytest.skip("this torch asks cuDNN, which it loads with a GPU only")


@contextmanager
def skip_if_scores_are_read_only() -> Iterator[None]:
    """A score_mod that writes into its score, which torch 2.15 refuses itself."""
    try:
        yield
    except Unsupported as error:
        if "Encountered input mutation" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__} refuses writes to scores itself")
