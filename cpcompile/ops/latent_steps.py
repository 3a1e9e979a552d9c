"""cp_whole::latent_keys: every rank makes the keys of all tokens of latents.

    w1 = latent_keys(latent, "gather")  ->  k1 = up(w1)  ->  k = latent_keys(k1, "keys")

It has no effect on the whole sequence; what it means on ranks is in
passes/whole/shared_mixer_rules.py. The gradient of a step is the step back.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from cpcompile.ops.comm.communicating import goes_back_by

WHOLE = "cp_whole"  # the namespace of calls on whole sequences, which nothing runs


class LatentStep(StrEnum):
    """What becomes of a value; between two steps calls are those of one device."""

    GATHER = "gather"  # all of it, on every rank
    SUM = "sum"  # of what the ranks have
    KEYS = "keys"  # what every rank has made is whole
    SUMMAND = "summand"  # of a sum over the ranks


_BACK = {
    LatentStep.GATHER: LatentStep.SUM,
    LatentStep.KEYS: LatentStep.SUMMAND,
}


@torch.library.custom_op(f"{WHOLE}::latent_keys", mutates_args=())
def latent_keys(x: Tensor, step: str) -> Tensor:
    """Return a copy of x."""
    return x.clone()


def _gradient(grad: Tensor, _: Any, step: str) -> Any:
    return latent_keys(grad, _BACK[LatentStep(step)])


latent_keys.register_fake(lambda x, step: torch.empty_like(x))
goes_back_by(latent_keys, _gradient)
LATENT_KEYS = torch.ops.cp_whole.latent_keys.default
