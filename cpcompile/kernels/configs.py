"""Tile sizes, warps and pipeline stages of the step kernels, by architecture."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch


class Kernel(Enum):
    """The kernels of a step; the value is the file stem of the template.

    DBIAS is launched only where a bias of positions has a gradient.
    """

    FORWARD = "attention_step"
    DKDV = "attention_step_dkdv"
    DQ = "attention_step_dq"
    DBIAS = "attention_step_dbias"


STEP_KERNELS = (Kernel.FORWARD, Kernel.DKDV, Kernel.DQ)  # of every step


@dataclass(frozen=True)
class StepConfig:
    """The tile of a program, query rows by keys, and how the program is compiled."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


ARCHITECTURES = ("sm80", "sm90", "sm100", "gfx942")

# NVIDIA chips with 99 KB of shared memory per block: consumer parts of each generation.
_SMALL = ("sm86", "sm89", "sm120", "sm121")

_Rows = dict[int, tuple[tuple[int, int, int, int], ...]]

# Note [Step tables]
# (BLOCK_M, BLOCK_N, warps, stages) for 16-bit operands, by architecture and padded head
# dim; the first is the default. The comments are about the default: registers, when all
# is visible / causal, and shared memory, as compiled ahead of time by triton 3.9 with
# accumulators, static strides and 4 heads per key head. "+n" is n stores of spilled
# registers; elsewhere nothing spills. Shared memory ends at 163 KB (sm80), 227 KB
# (sm90, sm100), 99 KB (small; seen for sm86) and 64 KB (gfx942, where a lane has 512
# registers).
#
# The candidates of sm90 are the fastest of 10 to 19 that were timed on an H200, full
# and causal (docs/results/gpu_report.md, section c). Two things are seen there alone:
# with fewer than 3 stages most tiles wait for their loads, and at head dim 256 large
# tiles that spill are up to twice as fast as small ones that do not. At head dim 64 the
# fastest backward, 128 x 64, is 5 % faster than the default, but spills 100 times with
# a softcap. Of the other architectures nothing was measured.
#
# A warp should have 16 rows of the scores to itself (BLOCK_M of forward and dq, BLOCK_N
# of dkdv, whose scores are transposed): otherwise warps of sm90 repeat each other's
# work. At head dim 256 that is accepted where the accumulators would not fit otherwise.
_TABLES: dict[tuple[Kernel, str], _Rows] = {
    (Kernel.FORWARD, "sm80"): {
        64: ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)),  # 246 / 253, 48 KB
        128: ((128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 8, 2)),  # 188 / 230, 96 KB
        256: ((64, 64, 8, 2), (64, 32, 4, 3)),  # 171 / 183, 104 KB
    },
    (Kernel.FORWARD, "sm90"): {
        64: ((64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 3)),  # 107 / 128, 56 KB
        128: ((64, 64, 4, 3), (128, 128, 8, 3), (128, 64, 4, 2)),  # 144 / 168, 112 KB
        256: ((128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2)),  # 249 / 254+5, 192 KB
    },
    (Kernel.FORWARD, "sm100"): {
        64: ((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3)),  # 162 / 224, 81 KB
        128: ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3)),  # 142 / 220, 129 KB
        256: ((64, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),  # 144 / 150, 161 KB
    },
    (Kernel.FORWARD, "gfx942"): {
        64: ((128, 64, 4, 1), (128, 64, 4, 2), (128, 64, 8, 2)),  # 142 / 212, 32 KB
        128: ((128, 64, 4, 1), (128, 64, 8, 1), (128, 32, 4, 2)),  # 272 / 288, 64 KB
        256: ((64, 32, 4, 1), (32, 32, 4, 1)),  # 250 / 263, 64 KB
    },
    (Kernel.FORWARD, "small"): {
        64: ((128, 64, 4, 2), (64, 64, 4, 2)),  # 238 / 255, 32 KB
        128: ((128, 64, 8, 2), (64, 64, 4, 2)),  # 195 / 203, 64 KB
        256: ((64, 32, 8, 1), (32, 32, 4, 1)),  # 157 / 169, 52 KB
    },
    (Kernel.DQ, "sm80"): {
        64: ((128, 64, 8, 2), (64, 64, 4, 3)),  # 187 / 184, 48 KB
        128: ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2)),  # 250 / 255, 96 KB
        256: ((64, 64, 8, 2), (64, 32, 8, 2)),  # 186 / 186, 136 KB
    },
    (Kernel.DQ, "sm90"): {
        64: ((64, 64, 4, 3), (128, 64, 4, 3), (64, 128, 4, 3)),  # 122 / 142, 64 KB
        128: ((128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)),  # 170 / 175, 160 KB
        256: ((128, 32, 8, 2), (64, 32, 4, 1), (64, 64, 8, 2)),  # 255+15 / +17, 192 KB
    },
    (Kernel.DQ, "sm100"): {
        64: ((128, 64, 8, 2), (128, 128, 8, 2)),  # 90 / 112, 73 KB
        128: ((128, 64, 8, 2), (64, 64, 4, 2)),  # 158 / 158, 145 KB
        256: ((64, 32, 8, 2), (64, 64, 8, 2)),  # 158 / 156, 145 KB
    },
    (Kernel.DQ, "gfx942"): {
        64: ((64, 64, 4, 1), (128, 64, 8, 1)),  # 236 / 254, 16 KB
        128: ((64, 32, 4, 1), (64, 64, 4, 1), (128, 32, 8, 1)),  # 204 / 224, 32 KB
        256: ((32, 32, 4, 1), (64, 16, 8, 1)),  # 338 / 341, 32 KB
    },
    (Kernel.DQ, "small"): {
        64: ((64, 64, 4, 2), (128, 64, 8, 2)),  # 188 / 185, 32 KB
        128: ((64, 64, 4, 2), (64, 32, 4, 2)),  # 220 / 230, 72 KB
        256: ((64, 16, 8, 1), (32, 16, 4, 1)),  # 174 / 173, 80 KB
    },
    (Kernel.DKDV, "sm80"): {
        64: ((64, 128, 8, 2), (32, 128, 8, 2)),  # 234 / 241, 48 KB
        128: ((64, 64, 8, 2), (32, 64, 4, 2)),  # 158 / 166, 72 KB
        256: ((32, 64, 8, 2), (16, 64, 8, 2)),  # 241 / 242, 100 KB
    },
    (Kernel.DKDV, "sm90"): {
        64: ((64, 64, 4, 3), (128, 64, 4, 2), (64, 64, 4, 2)),  # 164 / 180, 65 KB
        128: ((64, 128, 8, 3), (64, 64, 4, 2), (32, 64, 4, 3)),  # 238 / 249, 161 KB
        256: ((64, 64, 8, 2), (32, 64, 8, 2)),  # 255+25 / 255+49, 193 KB
    },
    (Kernel.DKDV, "sm100"): {
        64: ((64, 128, 8, 2), (64, 64, 4, 2)),  # 122 / 170, 81 KB
        128: ((64, 128, 8, 2), (32, 128, 8, 2), (64, 64, 8, 2)),  # 190 / 185, 161 KB
        256: ((64, 64, 8, 1), (32, 64, 8, 2)),  # 197 / 207, 128 KB
    },
    (Kernel.DKDV, "gfx942"): {
        64: ((32, 64, 4, 1), (64, 64, 4, 1), (32, 128, 4, 1)),  # 168 / 180, 16 KB
        128: ((32, 64, 4, 1), (16, 64, 4, 1)),  # 269 / 280, 32 KB
        256: ((16, 64, 8, 1), (32, 32, 4, 1)),  # 223 / 236, 64 KB
    },
    (Kernel.DKDV, "small"): {
        64: ((64, 64, 4, 2), (32, 128, 8, 2)),  # 244 / 239, 32 KB
        128: ((64, 64, 8, 2), (32, 64, 4, 2)),  # 160 / 165, 72 KB
        256: ((32, 32, 4, 2), (16, 32, 4, 1)),  # 228 / 240, 66 KB
    },
}

# Square tiles, as a bias of distances needs. At head dim 256 tiles of 64 would spill
# 155 times on sm80, and only they have rows enough for the matrix units of sm90.
for _name, _of_256 in (
    ("sm80", (32, 32, 4, 1)),
    ("sm90", (64, 64, 8, 1)),
    ("sm100", (64, 64, 8, 1)),
    ("gfx942", (32, 32, 4, 1)),
    ("small", (32, 32, 4, 1)),
):
    _TABLES[Kernel.DBIAS, _name] = {128: ((64, 64, 4, 1),), 256: (_of_256,)}

# float32 operands, all architectures: twice the bytes, no tensor cores without TF32.
_FLOAT32: dict[Kernel, _Rows] = {
    Kernel.FORWARD: {
        64: ((32, 32, 4, 2), (64, 32, 4, 2)),
        128: ((32, 16, 4, 2), (32, 32, 4, 2)),
        256: ((16, 16, 4, 2),),
    },
    Kernel.DQ: {
        64: ((32, 32, 4, 2),),
        128: ((32, 16, 4, 2), (16, 16, 4, 2)),
        256: ((16, 16, 4, 2),),
    },
    Kernel.DKDV: {
        64: ((16, 32, 4, 2), (32, 32, 4, 2)),
        128: ((16, 32, 4, 1),),
        256: ((16, 16, 4, 1),),
    },
    Kernel.DBIAS: {128: ((32, 32, 4, 1),), 256: ((16, 16, 4, 1),)},
}


def padded(dim: int) -> int:
    """Return the head dim that a tile holds: the next power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def architecture(device: torch.device) -> str:
    """Name the architecture of a GPU: "sm90", "gfx942" and so on."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm{properties.major}{properties.minor}"


def configs(
    kernel: Kernel, architecture: str, dtype: torch.dtype, padded_dim: int
) -> tuple[StepConfig, ...]:
    """Return the default, then candidates for autotuning; see Note [Step tables].

    `padded_dim` is the larger of the padded head dims of keys and values. Architectures
    without a table use the table of the nearest older one.
    """
    if dtype.itemsize == 4:
        rows = _FLOAT32[kernel]
    else:
        rows = _TABLES[kernel, _table(architecture)]
    # Beyond 256 nothing was tried; the tiles of 256 are the smallest there are.
    dim = next((x for x in rows if padded_dim <= x), max(rows))
    return tuple(StepConfig(*values) for values in rows[dim])


def _table(architecture: str) -> str:
    if architecture.startswith("gfx"):
        return "gfx942"
    version = int(architecture.removeprefix("sm"))
    if architecture in _SMALL or version < 80:
        return "small"
    capabilities = (80, 90, 100)
    return f"sm{max(x for x in capabilities if x <= version)}"
