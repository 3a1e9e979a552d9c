"""Whole models and programs, unmodified: results and gradients equal one process."""

import pytest
import torch.distributed as dist

from tests.cpu.against_one_process import compare_calls
from tests.cpu.model_cases import check_model, run_model
from tests.cpu.on_ranks import on_ranks
from tests.cpu.programs import PROGRAMS, run_program
from tests.models.families.joined_streams import MODELS
from tests.support.bounds import check


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "seq", "world", "door", "inner"),
    [
        ("small_gpt", 37, 3, "plain", "aot_eager"),
        ("small_gpt", 2, 4, "plain", "aot_eager"),
        ("small_gpt", 37, 3, "dtensor", "inductor"),
        ("checkpoint_one", 64, 2, "plain", "inductor"),
        ("checkpoint_all", 37, 2, "dtensor", "aot_eager"),
        ("llama", 37, 3, "plain", "aot_eager"),
        ("llama", 64, 2, "dtensor", "aot_eager"),
        ("gpt2", 37, 4, "plain", "aot_eager"),
        ("gpt2", 64, 2, "dtensor", "aot_eager"),
        ("small_gpt", 64, 2, "distributed", "aot_eager"),
    ],
)
@on_ranks("world", timeout=280)
def test_training_step(name, seq, world, door, inner):
    run = run_model(name, seq, world, door, {"inner": inner})
    check_model(name, seq, run["values"], dist.get_rank())
    assert run["rewritten"] == 2, "both layers' attention is context parallel"
    distributed = "DTensor" if door == "distributed" else "Tensor"
    assert run["grad_types"] == {distributed}
    if door == "distributed":
        assert run["grad_placements"] == {"(Replicate(),)"}
    result = "Tensor" if door == "plain" else "DTensor"
    assert run["result_types"] == (result, result)


@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize(("seq", "world"), [(16, 2), (17, 3)])
@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks("world")
def test_a_program_equals_one_process(name, seq, world, door):
    deviations, rewritten = run_program(PROGRAMS[name], seq, world, door)
    check(deviations)
    expected = {"Breaks": [1, 1], "ModuleEncoder": [2], "SequenceFirst": [2]}
    assert rewritten == expected.get(name, [1])


INFERRED = {
    "sd3": ["text dim 1 (inferred)"],
    "flux": ["latents dim 1 (inferred)", "text dim 1 (inferred)"],
    "split": ["latents dim 1 (inferred)", "text dim 1 (inferred)"],
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", MODELS)
@on_ranks("world")
def test_a_joined_stream_equals_one_process(name, world):
    make, inputs, lengths = MODELS[name]
    given = [x.double().requires_grad_() for x in inputs()]
    found = compare_calls(make().double(), [given], world)
    found.check()
    (report,) = found.reports
    assert [c.query[2] for c in report.calls if c.plan is not None] == lengths
    assert list(map(str, report.inputs)) == INFERRED.get(name, [])
    assert len(report.began) == (0 if name in ("flux", "split") else 1)
