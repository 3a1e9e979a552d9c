"""Whole models and programs, unmodified: results and gradients equal one process."""

import pytest
import torch

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
        ("small_gpt", 64, 2, "plain", "inductor"),
        ("small_gpt", 37, 3, "plain", "aot_eager"),
        ("small_gpt", 2, 4, "plain", "aot_eager"),
        ("small_gpt", 37, 3, "dtensor", "inductor"),
        ("checkpoint_one", 64, 2, "plain", "inductor"),
        ("checkpoint_all", 37, 2, "dtensor", "aot_eager"),
        ("llama", 64, 2, "plain", "inductor"),
        ("llama", 37, 3, "plain", "aot_eager"),
        ("llama", 64, 2, "dtensor", "aot_eager"),
        ("gpt2", 64, 2, "plain", "inductor"),
        ("gpt2", 37, 4, "plain", "aot_eager"),
        ("gpt2", 64, 2, "dtensor", "aot_eager"),
    ],
)
def test_training_step(pools, name, seq, world, door, inner):
    check_run(pools, name, seq, world, door, {"inner": inner})


def test_training_step_of_distributed_parameters(pools):
    how = {"inner": "aot_eager"}
    check_run(pools, "small_gpt", 64, 2, "distributed", how)


def check_run(pools, name, seq, world, door, how):
    runs = pools[world].run(run_model, name, seq, world, door, how, timeout=240)
    for rank, run in enumerate(runs):
        check_model(name, seq, run["values"], rank)
        assert run["rewritten"] == 2, "both layers' attention is context parallel"
        distributed = "DTensor" if door == "distributed" else "Tensor"
        assert run["grad_types"] == {distributed}
        if door == "distributed":
            assert run["grad_placements"] == {"(Replicate(),)"}
        result = "Tensor" if door == "plain" else "DTensor"
        assert run["result_types"] == (result, result)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_forced_strategies_and_sharded_outputs(pools, strategy):
    how = {"inner": "aot_eager", "strategy": strategy, "gather_outputs_megabytes": 0}
    runs = pools[2].run(run_model, "small_gpt", 64, 2, "plain", how, timeout=120)
    for rank, run in enumerate(runs):
        check_model("small_gpt", 64, run["values"], rank)
        assert run["result_types"] == ("Tensor", "DTensor")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize(("seq", "world"), [(16, 2), (17, 3)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_equals_one_process(pools, name, seq, world, door):
    given = PROGRAMS[name], seq, world, door, "auto"
    runs = pools[world].run(run_program, *given, timeout=90)
    for deviations, rewritten in runs:
        check(deviations)
        expected = {"Breaks": [1, 1], "ModuleEncoder": [2], "SequenceFirst": [2]}
        twice = {"ThreeDims": [2], "OneKeyHead": [2]}
        if name != "Helpers":  # its calls are in frames that Dynamo may cut otherwise
            assert rewritten == (expected | twice).get(name, [1])


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
