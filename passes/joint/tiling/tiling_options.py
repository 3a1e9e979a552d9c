"""Turn the options of a call into what runs tile by tile."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cpcompile.logs import warn_once, warn_unmet
from cpcompile.options import Options
from cpcompile.settings import setting

from .tile_tokens import Tiling

_ON_A_CPU = 64 * 2**20
_SHARE = 128  # of the memory of an accelerator


def tiling_of(options: Options, device_type: str, parameters: Sequence[int]) -> Tiling:
    """Return what `tile_tokens` cuts, and how.

    parameters: which inputs are parameters.
    """
    if options.tile == 0:
        parameters = ()
    megabytes = setting("tile_megabytes")
    tile_bytes = (
        _tile_bytes(device_type) if megabytes is None else int(megabytes * 2**20)
    )
    return Tiling(
        tile=options.tile or None,
        tile_bytes=max(tile_bytes, 1),
        least=int(setting("tile_least_megabytes") * 2**20),
        recompute=bool(options.tile),
        fixed=frozenset(parameters),
    )


def least_in_tiles(options: Options) -> float:
    """Return the bytes of the smallest value for which a region runs in tiles."""
    megabytes = math.inf if options.tile == 0 else setting("tile_least_megabytes")
    return float(megabytes * 2**20)


def _tile_bytes(device_type: str) -> int:
    if device_type != "cuda" or not torch.cuda.is_available():
        return _ON_A_CPU
    return torch.cuda.get_device_properties().total_memory // _SHARE


def warn_of_no_tiles(options: Options, tiling: Tiling, frame: str) -> None:
    """Warn if tiles were asked for by a number of tokens, and there are none.

    Warn also if the loss could run in tiles if less was returned.
    """
    for path, size in tiling.returned:
        warn_once(
            f"{frame}: {path} makes a result of {size / 2**20:.0f} MiB on every rank "
            "beside the loss, and so the loss does not run in tiles either. Return the "
            "loss alone, name the needed ones in cpcompile.config.outputs, or "
            "set options['tile'] to a number of tokens"
        )
    if options.tile and not tiling.found:
        why = (
            "nothing runs in tiles, because no region is token-wise, has more tokens "
            "on this rank and values of "
            f"{setting('tile_least_megabytes'):g} MB or more "
            "(cpcompile.config.tile_least_megabytes)"
        )
        warn_unmet(frame, f"options['tile'] = {options.tile}", why)
