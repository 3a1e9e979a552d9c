"""Every configuration of the kernels compiles for every architecture and fits it.

Without --all these are those that are used without autotuning, of which only what
docs/results/aot.json does not have as it is now is compiled.
"""

import pytest
import torch
import triton

from cpcompile.kernels.configs import ARCHITECTURES, Kernel
from tests.case_selection import runs_all
from tools.bench.aot import measure_changed
from tools.bench.aot_cases import (
    BIASED,
    CHANGES,
    SHARED_BYTES,
    Case,
    Figures,
    cases,
    measure_all,
)

NVIDIA = ("sm80", "sm90", "sm100")
FIRST = ("sm90", "gfx942")  # the newest that people have, and another vendor's


EVERY = runs_all()


def wanted(architecture: str) -> list[Case]:
    found = cases((architecture,), every_visibility=bool)
    return [case for case in found if EVERY or case.is_default]


@pytest.fixture(
    scope="module",
    params=sorted(ARCHITECTURES, key=lambda x: (x not in FIRST, x)),
)
def compiled(request) -> list[tuple[Case, Figures]]:
    found = wanted(request.param)
    figures = measure_all(found) if EVERY else measure_changed(found)
    return list(zip(found, figures, strict=True))


@pytest.mark.timeout(900)
def test_every_config_compiles_and_fits(compiled):
    limit = SHARED_BYTES[compiled[0][0].architecture]
    wrong = [(c, f) for c, f in compiled if f.error or f.shared_bytes > limit]
    assert not wrong
    assert len({(c.kernel, c.dtype, c.dim) for c, _ in compiled}) == len(Kernel) * 2 * 4


# They read numbers for every pair.
IN_TILES = (*BIASED, "vectors, score_mod")

# At head dim 256 on sm90 tiles that spill are the fastest, as was measured. float32
# runs on no matrix units, and has no tile of dK/dV without spills; on gfx942 with
# Triton 3.8 (torch 2.14) neither.
SPILLING = {
    ("sm90", torch.bfloat16, 256),
    *((arch, torch.float32, dim) for arch in NVIDIA for dim in (128, 256)),
}
if triton.__version__.startswith("3.8."):
    SPILLING.add(("gfx942", torch.float32, 256))
MOST_SPILLS = 60  # of the tiles that were measured


@pytest.mark.timeout(900)
def test_defaults_keep_everything_in_registers(compiled):
    plain = [(c, f) for c, f in compiled if c.is_default and c.visible not in CHANGES]
    spilling = [(c, f.spills) for c, f in plain if f.spills]
    known = {x for x in SPILLING if x[0] == compiled[0][0].architecture}
    assert {(c.architecture, c.dtype, c.dim) for c, _ in spilling} == known
    half = [(c, n) for c, n in spilling if c.dtype is torch.bfloat16]
    assert all(n <= MOST_SPILLS for _, n in half)
    others = [c.kernel for c, _ in spilling if c.dtype is torch.float32]
    assert set(others) <= {Kernel.DKDV, Kernel.DQ}


@pytest.mark.timeout(900)
def test_changed_scores_spill_a_few_registers(compiled):
    """A softcap needs scores for longer, and others numbers besides what is plain."""
    changed = [(c, f) for c, f in compiled if c.visible in CHANGES]
    changed = [(c, f) for c, f in changed if c.kernel is not Kernel.DBIAS]
    assert len(changed) == 3 * 4 * len(CHANGES)
    spilling = [(c, f.spills) for c, f in changed if f.spills]
    others = [(c, n) for c, n in spilling if c.architecture not in NVIDIA]
    assert all(c.kernel is Kernel.DQ and n <= 3 for c, n in others)  # of dim 256
    measured = [n for c, n in spilling if (c.architecture, c.dim) == ("sm90", 256)]
    assert all(n <= 2 * MOST_SPILLS for n in measured)
    spilling = [x for x in spilling if (x[0].architecture, x[0].dim) != ("sm90", 256)]
    few = [(c, f) for c, f in spilling if c.visible not in IN_TILES]
    assert all(c.kernel is not Kernel.FORWARD and c.dim >= 128 for c, _ in few)
    assert all(n <= 40 for _, n in spilling)


@pytest.mark.timeout(900)
def test_half_precision_uses_the_matrix_units(compiled):
    """float32 runs on them too on some architectures, but need not."""
    half = [(c, f) for c, f in compiled if c.dtype.itemsize == 2]
    assert half
    assert not [(c, f) for c, f in half if f.products == 0]
