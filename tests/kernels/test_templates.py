"""The step kernels in Triton's interpreter equal a plain softmax in float64."""

import pytest
import torch

from cpcompile.geometry.blocks import Block
from cpcompile.geometry.visibility import ALL, NOTHING, Visible
from cpcompile.kernels.configs import STEP_KERNELS, Kernel, StepConfig
from cpcompile.kernels.constants import (
    EVERY_KEY,
    NO_MODIFIERS,
    DropoutConstants,
    RowLimits,
    ScoreModifiers,
    step_constants,
    tensor_names,
)
from cpcompile.kernels.render import rendered
from cpcompile.ops.step.dropout import Dropout
from tests.kernels.step_cases import SMALL, StepCase, low_cases
from tests.kernels.step_check import run_and_check

MASKS = [
    StepCase(ALL),
    StepCase(NOTHING),
    StepCase(Visible(upper=(1, 1))),
    StepCase(Visible(upper=(0, 0))),  # row 0 sees nothing
    StepCase(Visible(upper=(31, 31))),
    StepCase(Visible(upper=(-30, -30))),  # 30 rows see nothing
    StepCase(Visible(upper=(0, 1))),
    StepCase(Visible(upper=(1, 0))),
    StepCase(Visible(upper=(-20, 9))),
    StepCase(Visible(rows=(32, 64))),
    StepCase(Visible(rows=(0, 200))),
    StepCase(Visible(rows=(5, 71))),
    StepCase(Visible(rows=(33, 40), upper=(1, 0))),
    StepCase(Visible(keys=(16, 48))),
    StepCase(Visible(keys=(0, 200))),
    StepCase(Visible(keys=(7, 50))),
    StepCase(Visible(keys=(7, 50), upper=(1, 1))),
    StepCase(Visible(rows=(5, 71), keys=(7, 50), upper=(-3, -2))),
    StepCase(lower="window"),
    StepCase(Visible(upper=(1, 1)), lower="window"),
    StepCase(Visible(upper=(3, 2)), lower="after"),  # within one tile
    StepCase(Visible(rows=(3, 90), keys=(5, 61), upper=(30, 31)), lower="window"),
    StepCase(upper="causal"),
    StepCase(upper="stairs"),
    StepCase(upper="beyond_both_ends"),
    StepCase(upper="after"),
    StepCase(lower="ahead"),
    StepCase(upper="ahead", lower="after"),
    StepCase(upper="next_document", lower="document"),
    StepCase(Visible(upper=(1, 1)), lower="document"),
    StepCase(Visible(rows=(5, 71), keys=(7, 50)), upper="causal", lower="window"),
]
CAUSAL = Visible(upper=(1, 1))
SHAPES = [
    StepCase(CAUSAL, rows=100, keys=77),
    StepCase(ALL, rows=100, keys=77, accumulate=False),
    StepCase(rows=100, keys=77, upper="causal", lower="window"),
    StepCase(Visible(upper=(0, 1)), lower="window", rows=77, keys=100),
    StepCase(CAUSAL, rows=1, keys=1),
    StepCase(CAUSAL, rows=40, keys=0),
    StepCase(CAUSAL, heads=6, kv_heads=2, batch=2, rows=40, keys=40),
    StepCase(CAUSAL, heads=2, kv_heads=2),
    StepCase(CAUSAL, heads=4, kv_heads=2, sequence_first=True, rows=50, keys=50),
    StepCase(CAUSAL, head_dim=80),
    StepCase(CAUSAL, head_dim=24, value_dim=40, rows=50, keys=50),
    StepCase(CAUSAL, head_dim=64, value_dim=32, accumulate=False),
    StepCase(CAUSAL, config=StepConfig(16, 64, 4, 1)),
    StepCase(Visible(upper=(9, 9)), lower="window", config=StepConfig(16, 64, 4, 1)),
    StepCase(CAUSAL, scale=-0.3),
    StepCase(CAUSAL, scale=0.0),
]
DTYPES = [
    StepCase(visible, dtype=dtype, head_dim=dim, accumulate=accumulate, final=final)
    for dtype in (torch.bfloat16, torch.float16)
    for visible, dim, accumulate, final in (
        (CAUSAL, 64, True, False),
        (Visible(upper=(0, 1)), 128, True, True),
        (ALL, 96, False, True),
        (Visible(upper=(0, 0)), 80, False, False),
        (Visible(keys=(7, 50)), 64, True, True),
    )
] + [StepCase(CAUSAL, final=True), StepCase(NOTHING, dtype=torch.bfloat16, final=True)]
CAP_AND_DROPOUT = {"softcap": 1.0, "dropout_p": 0.1}
# Softcaps at which most scores are bent, and hardly any.
CHANGED = [
    StepCase(ALL, softcap=0.5),
    StepCase(CAUSAL, softcap=30.0),
    StepCase(upper="causal", lower="window", softcap=1.0, rows=100, keys=77),
    StepCase(CAUSAL, softcap=1.0, scale=-0.3),
    StepCase(CAUSAL, softcap=1.0, scale=0.0),
    StepCase(ALL, softcap=0.5, scale=3000.0),  # all at the cap
    StepCase(ALL, dropout_p=0.25),
    StepCase(ALL, dropout_p=0.25, accumulate=False),
    StepCase(upper="causal", dropout_p=0.9, rows=100, keys=77),
    StepCase(Visible(rows=(5, 71), keys=(7, 50), upper=(9, 9)), dropout_p=0.5),
    StepCase(NOTHING, dropout_p=0.5),
    StepCase(upper="next_document", lower="document", softcap=1.0, dropout_p=0.25),
    StepCase(CAUSAL, heads=6, kv_heads=2, batch=2, softcap=1.0, dropout_p=0.5),
    StepCase(CAUSAL, config=StepConfig(16, 64, 4, 1), softcap=1.0, dropout_p=0.5),
    *low_cases(ALL, upper="causal", **CAP_AND_DROPOUT),
    *low_cases(Visible(keys=(7, 50)), accumulate=False, final=True, **CAP_AND_DROPOUT),
]


# A bias of positions, and its gradient.
BIASED = [
    StepCase(ALL, bias="key"),
    StepCase(ALL, bias="distance"),
    StepCase(CAUSAL, bias="distance of spans"),
    StepCase(CAUSAL, bias="key of spans", accumulate=False),
    StepCase(upper="causal", lower="window", bias="distance", rows=100, keys=77),
    StepCase(upper="causal", bias="distance", rows=77, keys=100, batch=2),
    StepCase(upper="stairs", bias="key", rows=77, keys=100, heads=6, kv_heads=2),
    StepCase(ALL, bias="distance hidden", accumulate=False),
    StepCase(ALL, bias="distance hidden", rows=50, keys=33),
    StepCase(ALL, bias="key hidden", rows=50, keys=33),
    StepCase(Visible(rows=(5, 71), keys=(7, 50)), bias="distance hidden"),
    StepCase(CAUSAL, bias="distance", rows=1, keys=40),
    StepCase(ALL, bias="distance", rows=40, keys=1),
    StepCase(ALL, bias="key", rows=40, keys=1),
    StepCase(NOTHING, bias="distance"),
    StepCase(CAUSAL, bias="distance", softcap=1.0, scale=-0.3),
    StepCase(CAUSAL, bias="key", scale=0.0),
    StepCase(CAUSAL, bias="distance of spans", dropout_p=0.25, softcap=1.0),
    StepCase(upper="causal", bias="key of spans", dropout_p=0.25, heads=4, kv_heads=2),
    StepCase(CAUSAL, bias="distance", config=StepConfig(16, 64, 4, 1)),
    *low_cases(CAUSAL, bias="distance"),
    *low_cases(ALL, bias="key hidden", accumulate=False, final=True),
]
CASES = [*MASKS, *SHAPES, *DTYPES, *CHANGED, *BIASED]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step(interpreter, case):
    run_and_check(interpreter, case)


@pytest.mark.parametrize("share", [0.3, 0.999])
@pytest.mark.parametrize("first", [0, 2**31 - 40])  # where positions wrap around
def test_every_kernel_drops_what_dropout_drops(interpreter, share, first):
    """Every weight by itself: scores are 0, and the other factor is the identity."""
    B, H, R, K = 2, 2, 50, 45
    seeds = torch.tensor([[0, 1], [2**31 - 1, 1234567890]])
    rows = torch.arange(R) * 3 + first
    dropout = Dropout(share, seeds, rows)
    part = Block(0, R, 0, K, position=first)
    kept = dropout.factors(part, torch.float32) > 0
    vectors = (x.to(torch.int32) for x in (seeds, rows, torch.arange(K) + first))
    more = {
        "changes": ScoreModifiers(
            0.0, DropoutConstants(dropout.drop_below, 1 - share, *vectors)
        )
    }
    limits = (EVERY_KEY, 1.0, False)

    def zeros(length, dim):
        return torch.zeros(B, H, length, dim)

    def identity(count):
        return torch.eye(count).expand(B, H, -1, -1)

    q, k, lse, delta = (
        zeros(R, K),
        zeros(K, K),
        zeros(R, 1)[..., 0],
        zeros(R, 1)[..., 0],
    )
    found = interpreter("forward", q, k, identity(K), None, None, *limits, **more)
    assert torch.equal(found[0] != 0, kept)
    ones_R, ones_K = torch.ones(B, H, R, 1), torch.ones(B, H, K, 1)
    saved = (ones_R, q, identity(K), ones_K, lse, delta)
    (dq,) = interpreter("gradients", Kernel.DQ, *saved, [], *limits, **more)
    assert torch.equal(dq != 0, kept)
    saved = (identity(R), q, k, zeros(K, R), lse, delta)
    _, dv = interpreter("gradients", Kernel.DKDV, *saved, [], *limits, **more)
    assert torch.equal(dv.mT != 0, kept)
    saved = (ones_R, identity(R), zeros(K, R), ones_K, lse, delta)
    dk, _ = interpreter("gradients", Kernel.DKDV, *saved, [], *limits, **more)
    assert torch.equal(dk.mT != 0, kept)


@pytest.mark.parametrize("kernel", STEP_KERNELS)
def test_other_sizes_use_the_same_kernel(kernel):
    def render(rows, keys):
        constants = step_constants(
            config=SMALL,
            rows=rows,
            keys=keys,
            head_dim=16,
            value_dim=16,
            heads_per_kv=1,
            limits=RowLimits(CAUSAL),
            accumulate=True,
            scale=0.3,
            precision="ieee",
            divides=lambda n, block: n % block == 0,
            changes=NO_MODIFIERS,
        )
        constants["INDEX_DTYPE"] = "tl.int32"
        names = tensor_names(
            kernel,
            accumulate=True,
            limits=RowLimits(CAUSAL),
            changes=NO_MODIFIERS,
        )
        three = {"LSE", "DELTA", "LSE_IN", "LSE_OUT"}
        return rendered(kernel, constants, {x: 3 if x in three else 4 for x in names})

    assert render(64, 64) is render(128, 192)
    assert render(64, 64) is not render(64, 63)
