"""The compile-time constants and the tensor order of the step templates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpcompile.geometry.visibility import Pair, Visible
from cpcompile.kernels.configs import Kernel, StepConfig, padded

LOG2_E = math.log2(math.e)  # the kernels work in base 2: exp2 is one instruction
# The scale that stands for 0: a hidden score is -inf, and -inf * 0 would be NaN.
SMALLEST_SCALE = 1e-30


@dataclass(frozen=True)
class Dropping:
    """Dropout of weights: what is_kept in shared.py.jinja decides it by.

    drop_below: of 2^31, so many are dropped. kept_share: the others are divided by it.
    seeds_BH, rows_R, keys_K: int32; of every head, and the positions of rows and keys.
    """

    drop_below: int
    kept_share: float
    seeds_BH: Tensor
    rows_R: Tensor
    keys_K: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By their names in the templates."""
        return dict(
            zip(_DROPPING, (self.seeds_BH, self.rows_R, self.keys_K), strict=True)
        )


@dataclass(frozen=True)
class Changes:
    """What a call does to its scores and weights besides a mask.

    softcap: c > 0 makes c * tanh(s / c) of a scaled score s; 0 for none.
    """

    softcap: float = 0.0
    dropping: Dropping | None = None


UNCHANGED = Changes()
_DROPPING = ("SEEDS", "ROWS", "KEYS")


def step_constants(
    *,
    config: StepConfig,
    rows: Any,
    keys: Any,
    head_dim: int,
    value_dim: int,
    heads_per_kv: int,
    visible: Visible,
    upper_rows: bool,
    lower_rows: bool,
    accumulate: bool,
    scale: float,
    precision: str,
    divides: Callable[[Any, int], bool],
    changes: Changes,
) -> dict[str, Any]:
    """Every constexpr of the templates; the legend of each template says what it is.

    Those of a softcap and of dropout are there only with them. `rows` and `keys` may
    be symbolic; `divides(n, block)` says whether n is known to be a multiple of block.
    Strings come quoted, as they are pasted into the source.
    """
    row_start, row_stop, even_rows = _slice(visible.rows, rows, config.block_m, divides)
    key_start, key_stop, even_keys = _slice(visible.keys, keys, config.block_n, divides)
    upper_even, upper_odd = visible.upper or (0, 0)
    lower_even, lower_odd = visible.lower or (0, 0)
    size, cap, dropping = abs(scale), changes.softcap, changes.dropping
    changed: dict[str, Any] = {}
    if cap:
        # tanh(size * q k / cap) times cap is the score.
        changed["SCALE_IN_CAP"], size = size / cap, cap
    if dropping is not None:
        changed["DROP_BELOW"] = dropping.drop_below
        changed["KEPT_SHARE"] = dropping.kept_share
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "PADDED_HEAD_DIM": padded(head_dim),
        "PADDED_VALUE_DIM": padded(value_dim),
        "HEADS_PER_KV": heads_per_kv,
        "ACCUMULATE": accumulate,
        "SCALE": float(scale),
        "SCALE_LOG2": max(size, SMALLEST_SCALE) * LOG2_E,
        "NEGATE": scale < 0,
        "PRECISION": f"'{precision}'",
        "EVEN_ROWS": even_rows,
        "EVEN_KEYS": even_keys,
        "ROW_SLICE": visible.rows is not None,
        "ROW_START": row_start,
        "ROW_STOP": row_stop,
        "KEY_SLICE": visible.keys is not None,
        "KEY_START": key_start,
        "KEY_STOP": key_stop,
        "HAS_UPPER": upper_rows or visible.upper is not None,
        "UPPER_VECTOR": upper_rows,
        "UPPER_EVEN": upper_even,
        "UPPER_ODD": upper_odd,
        "HAS_LOWER": lower_rows or visible.lower is not None,
        "LOWER_VECTOR": lower_rows,
        "LOWER_EVEN": lower_even,
        "LOWER_ODD": lower_odd,
        **changed,
    }


def tensor_names(
    kernel: Kernel,
    *,
    accumulate: bool,
    upper_rows: bool,
    lower_rows: bool,
    dropout: bool,
) -> tuple[str, ...]:
    """The tensor arguments in order; the last of FORWARD and DKDV is an output."""
    operands, accumulators, second_output = {
        Kernel.FORWARD: (("Q", "K", "V"), ("OUT_IN", "LSE_IN"), ("LSE_OUT",)),
        Kernel.DKDV: (
            ("GRAD", "Q", "K", "V", "LSE", "DELTA"),
            ("DK_IN", "DV_IN"),
            ("DV_OUT",),
        ),
        Kernel.DQ: (("GRAD", "Q", "K", "V", "LSE", "DELTA"), ("DQ_IN",), ()),
    }[kernel]
    return (
        *operands,
        *(accumulators if accumulate else ()),
        *(("UPPER",) if upper_rows else ()),
        *(("LOWER",) if lower_rows else ()),
        *(_DROPPING if dropout else ()),
        *second_output,
    )


def dot_precision(dtype: torch.dtype) -> str:
    """How tl.dot treats float32: "tf32" only where PyTorch's own matmuls may."""
    may_round = torch.get_float32_matmul_precision() != "highest"
    if dtype == torch.float32 and may_round and torch.version.hip is None:
        return "tf32"
    return "ieee"


def _slice(
    limits: Pair | None, size: Any, block: int, divides: Callable[[Any, int], bool]
) -> tuple[int, int, bool]:
    """Start and stop of a slice (0, 0 without one), and if no tile of `block` is cut.

    Tiles cover all of the size in one kernel and only the slice in another, so both
    must be multiples. A stop that may lie beyond a symbolic size cuts.
    """
    if limits is None:
        return 0, 0, divides(size, block)
    start, stop = limits
    start = max(start, 0)
    if not isinstance(size, int):
        return start, stop, False
    stop = min(stop, size)
    even = divides(size, block) and divides(max(stop - start, 0), block)
    return start, stop, even
