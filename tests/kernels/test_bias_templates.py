"""A bias of positions in the step kernels, and its gradient, as in test_templates."""

import pytest

from cpcompile.geometry.visibility import ALL, NOTHING, Visible
from cpcompile.kernels.configs import StepConfig
from tests.kernels.step_cases import StepCase, low_cases
from tests.kernels.step_check import run_and_check

CAUSAL = Visible(upper=(1, 1))
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


@pytest.mark.parametrize("case", BIASED, ids=str)
def test_bias_of_positions(interpreter, case):
    run_and_check(interpreter, case)
