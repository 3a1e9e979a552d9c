"""Models whose streams are joined and split, not annotated, against one process.

The reference is the same model in one process in float64, and so is the compiled one;
see Note [Derived bounds] in tests/support/bounds.py.
"""

import pytest
import torch

from tests.cpu.against_one_process import compare_calls
from tests.cpu.on_ranks import on_ranks
from tests.models.families.joined_streams import MODELS

INFERRED = {
    "sd3": ["text dim 1 (inferred)"],
    "flux": ["latents dim 1 (inferred)", "text dim 1 (inferred)"],
    "split": ["latents dim 1 (inferred)", "text dim 1 (inferred)"],
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODELS)
@on_ranks("world")
def test_a_joined_stream_equals_one_process(name, world):
    torch.manual_seed(0)
    make, inputs, lengths = MODELS[name]
    given = [x.double().requires_grad_() for x in inputs()]
    found = compare_calls(make().double(), [given], world)
    found.check()
    (report,) = found.reports
    assert [c.query[2] for c in report.calls if c.plan is not None] == lengths
    assert list(map(str, report.inputs)) == INFERRED.get(name, [])
    assert len(report.began) == (0 if name in ("flux", "split") else 1)
