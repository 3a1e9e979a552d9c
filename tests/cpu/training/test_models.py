"""Whole models, unmodified: loss, logits and every gradient equal one process."""

import pytest

from tests.cpu.model_cases import check_model, run_model


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
    check_run(pools, name, seq, world, door, inner)


def test_training_step_of_distributed_parameters(pools):
    check_run(pools, "small_gpt", 64, 2, "distributed", "aot_eager")


def check_run(pools, name, seq, world, door, inner):
    runs = pools[world].run(
        run_model, name, seq, world, door, {"inner": inner}, timeout=240
    )
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
    runs = pools[2].run(
        run_model,
        "small_gpt",
        64,
        2,
        "plain",
        {"inner": "aot_eager", "strategy": strategy, "gather_outputs_megabytes": 0},
        timeout=120,
    )
    for rank, run in enumerate(runs):
        check_model("small_gpt", 64, run["values"], rank)
        assert run["result_types"] == ("Tensor", "DTensor")
