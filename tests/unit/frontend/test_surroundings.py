"""What ranks compare besides graphs: surroundings, and values of calls."""

import contextlib
from functools import partial

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpcompile import config
from cpcompile.frontend.rank_consistency.environment import how_watched, surroundings
from cpcompile.frontend.rank_consistency.rank_check import (
    RANDOM,
    Value,
    differences,
    is_due,
    is_quick,
    numbers,
)


def items(inductor=True, **variables):
    return surroundings("cuda", variables, inductor)


def changed(before, after):
    """name: (value before, value after) of the items that differ."""
    assert before.keys() == after.keys()
    return {k: (before[k], after[k]) for k in before if before[k] != after[k]}


@contextlib.contextmanager
def switched(get, set_to, value):
    before = get()
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


def deterministic():
    return switched(
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    )


def default_dtype():
    return switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64)


def matmul_precision():
    return switched(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"
    )


SETTINGS = {
    "tie_fraction": ("0.05", 0.5),
    "step_kernel": ("'auto'", "aten_math"),
    "unroll": ("'auto'", 4),
    "memory_budget": ("'auto'", 1 << 30),
    "check_overlap": ("False", True),
}
CHANGES = [
    (torch.no_grad, "grad mode", ("on", "off")),
    (torch.inference_mode, "grad mode", ("on", "off")),
    (
        *(lambda: torch.autocast("cpu", torch.bfloat16), "autocast of cpu"),
        ("off", "torch.bfloat16"),
    ),
    (default_dtype, "default dtype", ("torch.float32", "torch.float64")),
    (
        *(
            lambda: sdpa_kernel(SDPBackend.MATH),
            "kernels of scaled_dot_product_attention",
        ),
        ("['flash', 'mem_efficient', 'math', 'cudnn']", "['math']"),
    ),
    (
        lambda: inductor_config.patch(reorder_for_peak_memory=False),
        "inductor setting reorder_for_peak_memory",
        ("True", "False"),
    ),
    (
        lambda: functorch_config.patch(activation_memory_budget=0.5),
        "functorch setting activation_memory_budget",
        ("1.0", "0.5"),
    ),
    *(
        (partial(config.patch, **{x: y}), f"cpcompile.config.{x}", (before, repr(y)))
        for x, (before, y) in SETTINGS.items()
    ),
]


@pytest.mark.parametrize(("change", "name", "values"), CHANGES)
def test_a_change_is_one_item(change, name, values):
    before = items()
    with change():
        assert changed(before, items()) == {name: values}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (matmul_precision, "matmul precision"),
        (deterministic, "deterministic algorithms"),
    ],
)
def test_a_change_that_torch_has_in_several_places(change, name):
    before = items()
    with change():
        assert name in changed(before, items())


@pytest.mark.parametrize(
    ("change", "inductor"),
    [
        (lambda: config.patch(agreement_timeout_seconds=7.0, hardware="h100"), True),
        (lambda: inductor_config.patch(debug=True, compile_threads=1), True),
        (lambda: inductor_config.patch(reorder_for_peak_memory=False), False),
    ],
)
def test_what_ranks_may_set_differently(change, inductor):
    """Settings of Inductor count where it compiles; texts have no addresses."""
    before = items(inductor, self=Block())
    with change():
        assert items(inductor, self=Block()) == before
    assert not [text for text in before.values() if " at 0x" in text]


@pytest.mark.parametrize(
    ("name", "value"), [("check_ranks", "first"), ("profile", "trace.json")]
)
def test_what_watches_a_program_is_compared_and_changes_none(name, value):
    before, watched = items(), how_watched()
    with config.patch({name: value}):
        assert items() == before
        assert changed(watched, how_watched()) == {
            f"cpcompile.config.{name}": ("'auto'", repr(value))
        }


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Dropout(), nn.Dropout()
        self.three = nn.Sequential(nn.Dropout(), nn.ReLU())


def test_the_training_mode_of_modules():
    block = Block()

    def mode():
        return items(self=block, x=torch.ones(1))["training mode of self"]

    assert mode() == "train"
    block.two.eval()
    assert mode() == "mixed, eval of two"
    block.three.eval()
    block.train(False)
    assert mode() == "eval"
    block.three.train()
    assert mode() == "mixed, eval of itself, one, two"


@pytest.mark.parametrize(
    ("rule", "calls"),
    [
        (None, [*range(1, 11), 100, 200, 300]),
        ("first", [1]),
        (1, list(range(1, 301))),
        (50, [1, 50, 100, 150, 200, 250, 300]),
    ],
)
def test_when_values_are_compared(rule, calls):
    assert [call for call in range(1, 301) if is_due(rule, call)] == calls


@pytest.mark.parametrize(("between", "quick"), [(0.05, False), (0.03, True)])
def test_calls_are_quick_if_meetings_take_a_share_of_them(between, quick):
    compiling = [(0.0, 50.0), (50.0, 100.0)]  # the first meetings wait for compilers
    starts = [100.0 + between * call for call in range(8)]
    assert is_quick([*compiling, *((x, x + 1e-4) for x in starts)]) == quick


VALUES = [RANDOM, Value("input x", "pass the whole"), Value("buffer b", "load")]


def test_what_differs_is_named_with_the_first_rank_of_each_value():
    assert differences(VALUES, [[1, 2, 3]] * 3) == ""
    text = differences(VALUES, [[1, 2, 3], [1, 2, 5], [1, 2, 3]])
    assert text.startswith("buffer b: rank 0 has ") and "rank 1 has " in text
    assert "rank 2" not in text
    assert text.endswith("; needed the same on every rank: load")
    text = differences(VALUES, [[1, 2], [0, 3]])  # of a call without the last value
    assert "every rank: seed alike (torch.manual_seed) before the first call" in text
    assert text.endswith("; pass the whole")
    values = [Value(f"input {i}", "pass it") for i in range(9)]
    what, _ = differences(values, [[0] * 9, [1] * 9]).split("; needed")
    names = [text.split(":")[0] for text in what.split("; ")]
    assert names == ["input 0", "input 1", "input 2", "and 6 more"]


def test_digests_keep_their_order_and_all_their_bits():
    large = 2**63 - 1
    digests = [torch.tensor(x) for x in (large, 5, -large, 6)]
    assert numbers(digests) == [large, 5, -large, 6]
