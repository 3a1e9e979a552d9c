"""Models whose streams are joined and split, not annotated, against one process.

The reference is the same model in one process in float64, and so is the compiled one:
errors are roundings.
"""

import copy

import pytest
import torch

from cpcompile.reporting.report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.models.joined_streams import MODELS

LIMIT = 1e-12  # float64; relative to the largest value of a tensor, see attention_cases


def run_joined(name: str, world: int, inner: str) -> dict[str, object]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    make, inputs, _ = MODELS[name]
    model = make().double()
    given = [x.double() for x in inputs()]
    alone = copy.deepcopy(model)
    wanted = results(alone, alone, given)
    options = {"mesh": sequence_mesh(world), "inner": inner}
    step = torch.compile(model, backend="cp", options=options)
    with recording() as reports:
        got = results(model, step, given)
    (report,) = reports
    return {
        "errors": [relative_error(x, y) for x, y in zip(got, wanted, strict=True)],
        "lengths": [c.query[2] for c in report.calls if c.plan is not None],
        "inputs": list(map(str, report.inputs)),
        "began": len(report.began),
    }


def results(model, call, given):
    given = [x.clone().requires_grad_() for x in given]
    out = call(*given)
    (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).sin().sum().backward()
    leaves = (*given, *model.parameters())
    grads = (torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
    return [out.detach(), *grads]


def relative_error(x, reference) -> float:
    assert x.shape == reference.shape and type(x) is torch.Tensor
    size = max(reference.abs().max().item(), 1e-3)
    return (x - reference).abs().max().item() / size


INFERRED = {
    "sd3": ["text dim 1 (inferred)"],
    "flux": ["latents dim 1 (inferred)", "text dim 1 (inferred)"],
    "split": ["latents dim 1 (inferred)", "text dim 1 (inferred)"],
}


@pytest.mark.core("registers-2-aot_eager")
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("world", "inner"), [(2, "aot_eager"), (3, "aot_eager")])
@pytest.mark.parametrize("name", MODELS)
def test_a_joined_stream_equals_one_process(pools, name, world, inner):
    for run in pools[world].run(run_joined, name, world, inner, timeout=150):
        assert max(run["errors"]) < LIMIT, run
        assert run["lengths"] == MODELS[name][2]
        assert run["inputs"] == INFERRED.get(name, [])
        assert run["began"] == (0 if name in ("flux", "split") else 1)
