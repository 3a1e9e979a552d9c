"""Models whose streams are joined and split, not annotated, against one process.

The reference is the same model in one process in float64, and so is the compiled one;
see Note [Derived bounds] in tests/support/bounds.py.
"""

import copy

import pytest
import torch

from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.models.families.joined_streams import MODELS
from tests.support.bounds import check, deviations


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
        "deviations": deviations(got, wanted),
        "lengths": [c.query[2] for c in report.calls if c.plan is not None],
        "inputs": list(map(str, report.inputs)),
        "began": len(report.began),
    }


def results(model, call, given):
    given = [x.clone().requires_grad_() for x in given]
    out = call(*given)
    (out * torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)).sin().sum().backward()
    assert type(out) is torch.Tensor
    leaves = {f"input {n}": x for n, x in enumerate(given)}
    leaves |= dict(model.named_parameters())
    grads = {
        f"grad of {name}": torch.zeros_like(x) if x.grad is None else x.grad.clone()
        for name, x in leaves.items()
    }
    return {"out": out.detach()} | grads


INFERRED = {
    "sd3": ["text dim 1 (inferred)"],
    "flux": ["latents dim 1 (inferred)", "text dim 1 (inferred)"],
    "split": ["latents dim 1 (inferred)", "text dim 1 (inferred)"],
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("world", "inner"), [(2, "aot_eager"), (3, "aot_eager")])
@pytest.mark.parametrize("name", MODELS)
def test_a_joined_stream_equals_one_process(pools, name, world, inner):
    for run in pools[world].run(run_joined, name, world, inner, timeout=150):
        check(run["deviations"])
        assert run["lengths"] == MODELS[name][2]
        assert run["inputs"] == INFERRED.get(name, [])
        assert run["began"] == (0 if name in ("flux", "split") else 1)
