"""The compile-time constants and the tensor order of the step templates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cpcompile.geometry.visibility import ALL, Pair, Visible
from cpcompile.kernels.configs import Kernel, StepConfig, padded

LOG2_E = math.log2(math.e)  # the kernels work in base 2: exp2 is one instruction
# The scale that stands for 0: a hidden score is -inf, and -inf * 0 would be NaN.
SMALLEST_SCALE = 1e-30


@dataclass(frozen=True)
class RowLimits:
    """Which keys of a chunk each row sees: a few integers, or a range for each row.

    upper, lower: int32 [R], never decreasing, or nodes of Inductor: row i sees the keys
        lower[i] <= j < upper[i]. `upper` stands in the place of that of `visible`.
    """

    visible: Visible = ALL
    upper: Any = None
    lower: Any = None

    @property
    def tensors(self) -> dict[str, Any]:
        """Vectors by their names in the templates, in the order of the kernels."""
        by_name = {"UPPER": self.upper, "LOWER": self.lower}
        return {name: x for name, x in by_name.items() if x is not None}


EVERY_KEY = RowLimits()


@dataclass(frozen=True)
class DropoutConstants:
    """Dropout of weights: the numbers by which is_kept in shared.py.jinja decides.

    drop_below: how many of 2^31 numbers drop a weight. kept_share: the kept weights are
    divided by it. seeds_BH, rows_R, keys_K: int32; a seed of every head, and the
    positions of rows and keys.
    """

    drop_below: int
    kept_share: float
    seeds_BH: Tensor
    rows_R: Tensor
    keys_K: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by their names in the templates."""
        return {"SEEDS": self.seeds_BH, "ROWS": self.rows_R, "KEYS": self.keys_K}


@dataclass(frozen=True)
class BiasConstants:
    """A bias of positions: what bias_of in shared.py.jinja reads.

    table_BHN: float32, one number per key, or per distance. keys_K: int32, positions of
    the keys. offsets_R: int32, for each row what, added to the position of a key, is
    the entry of the table; None if the position itself is the entry. row_shift_BHR:
    float32, subtracted from the bias of a row; no NaN, no Inf. Strides may be 0.
    """

    table_BHN: Tensor
    keys_K: Tensor
    offsets_R: Tensor | None
    row_shift_BHR: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by their names in the templates."""
        by_name = {
            "KEYS": self.keys_K,
            "BIAS": self.table_BHN,
            "ROW_SHIFT": self.row_shift_BHR,
        }
        return (
            by_name if self.offsets_R is None else by_name | {"OFFSETS": self.offsets_R}
        )


@dataclass(frozen=True)
class ScoreModConstants:
    """A score_mod: what score_functions.py made of it, and what these functions read.

    values_N: all that it captures, of any real dtype. rows_R, keys_K, batches_B: int32;
    positions of rows and keys, and the numbers of the batch entries.
    """

    functions: str
    values_N: Tensor
    rows_R: Tensor
    keys_K: Tensor
    batches_B: Tensor

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by their names in the templates."""
        by_name = {"ROWS": self.rows_R, "KEYS": self.keys_K}
        return by_name | {"VALUES": self.values_N, "BATCHES": self.batches_B}


@dataclass(frozen=True)
class ScoreModifiers:
    """Changes of scores and weights by a call, in addition to a mask.

    softcap: c > 0 makes c * tanh(s / c) of a scaled score s; 0 for none. The bias is
    added to the result of that, or the result goes through a score_mod; there are not
    both.
    """

    softcap: float = 0.0
    dropping: DropoutConstants | None = None
    biasing: BiasConstants | None = None
    scoring: ScoreModConstants | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors by their names in the templates, in the order of the kernels.

        They read the same positions of rows and keys.
        """
        modifiers = (self.dropping, self.scoring, self.biasing)
        return {n: x for y in modifiers if y is not None for n, x in y.tensors.items()}

    def of_part(self, rows: slice, keys: slice) -> ScoreModifiers:
        """Return the same changes for some of the rows and some of the keys."""
        drop, bias = self.dropping, self.biasing
        if drop is not None:
            drop = replace(drop, rows_R=drop.rows_R[rows], keys_K=drop.keys_K[keys])
        if bias is not None:
            offsets = None if bias.offsets_R is None else bias.offsets_R[rows]
            row_shift = bias.row_shift_BHR[..., rows]
            bias = BiasConstants(bias.table_BHN, bias.keys_K[keys], offsets, row_shift)
        assert self.scoring is None, "only the gradient of a bias is made of parts"
        return ScoreModifiers(self.softcap, drop, bias)


NO_MODIFIERS = ScoreModifiers()


def step_constants(
    *,
    config: StepConfig,
    rows: Any,
    keys: Any,
    head_dim: int,
    value_dim: int,
    heads_per_kv: int,
    limits: RowLimits,
    accumulate: bool,
    scale: float,
    precision: str,
    divides: Callable[[Any, int], bool],
    changes: ScoreModifiers,
) -> dict[str, Any]:
    """Return every constexpr of the templates, whose legends say what each is.

    Constants of a softcap, dropout or a bias are there only with it. `rows` and `keys`
    may be symbolic; `divides(n, block)` says whether n is known to be a multiple of
    block. Strings come quoted, as they are pasted into the source.
    """
    visible = limits.visible
    row_start, row_stop, even_rows = _slice(visible.rows, rows, config.block_m, divides)
    key_start, key_stop, even_keys = _slice(visible.keys, keys, config.block_n, divides)
    upper_even, upper_odd = visible.upper or (0, 0)
    size, cap, dropping = abs(scale), changes.softcap, changes.dropping
    changed: dict[str, Any] = {}
    if cap:
        # tanh(size * q k / cap) times cap is the score.
        changed["SCALE_IN_CAP"], size = size / cap, cap
    if dropping is not None:
        changed["DROP_BELOW"] = dropping.drop_below
        changed["KEPT_SHARE"] = dropping.kept_share
    if changes.biasing is not None:
        changed["BIAS_BY_KEY"] = changes.biasing.offsets_R is None
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
        "HAS_UPPER": limits.upper is not None or visible.upper is not None,
        "UPPER_VECTOR": limits.upper is not None,
        "UPPER_EVEN": upper_even,
        "UPPER_ODD": upper_odd,
        "HAS_LOWER": limits.lower is not None,
        **changed,
    }


def tensor_names(
    kernel: Kernel,
    *,
    accumulate: bool,
    limits: RowLimits,
    changes: ScoreModifiers,
) -> tuple[str, ...]:
    """List the tensor arguments in order; the last of FORWARD and DKDV is an output."""
    operands, accumulators, second_output = {
        Kernel.FORWARD: (("Q", "K", "V"), ("OUT_IN", "LSE_IN"), ("LSE_OUT",)),
        Kernel.DKDV: (
            ("GRAD", "Q", "K", "V", "LSE", "DELTA"),
            ("DK_IN", "DV_IN"),
            ("DV_OUT",),
        ),
        Kernel.DQ: (("GRAD", "Q", "K", "V", "LSE", "DELTA"), ("DQ_IN",), ()),
        Kernel.DBIAS: (("GRAD", "Q", "K", "V", "LSE", "DELTA"), (), ()),
    }[kernel]
    return (
        *operands,
        *(accumulators if accumulate else ()),
        *limits.tensors,
        *changes.tensors,
        *second_output,
    )


def dot_precision(dtype: torch.dtype) -> str:
    """Choose how tl.dot treats float32: "tf32" only where PyTorch's own matmuls may."""
    may_round = torch.get_float32_matmul_precision() != "highest"
    if dtype == torch.float32 and may_round and torch.version.hip is None:
        return "tf32"
    return "ieee"


def _slice(
    pair: Pair | None, size: Any, block: int, divides: Callable[[Any, int], bool]
) -> tuple[int, int, bool]:
    """Return start and stop of a slice (0, 0 without one), and if no tile is cut.

    Tiles cover all of the size in one kernel and only the slice in another, so both
    must be multiples. A stop that may lie beyond a symbolic size cuts.
    """
    if pair is None:
        return 0, 0, divides(size, block)
    start, stop = pair
    start = max(start, 0)
    if not isinstance(size, int):
        return start, stop, False
    stop = min(stop, size)
    even = divides(size, block) and divides(max(stop - start, 0), block)
    return start, stop, even
