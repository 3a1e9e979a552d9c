"""A wrong value of a setting is said with its name, where it is read."""

import gc
import resource

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from cpcompile import config
from cpcompile.errors import OptionError
from cpcompile.frontend.interpreter_state import gc_paused, with_large_stack
from cpcompile.reporting.graph_report import recording
from cpcompile.settings import setting, setting_names
from tests.golden.capture import fake_mesh

AUTOMATIC = (
    "check_ranks", "gather_outputs_megabytes", "gradient_bucket_megabytes", "hardware",
    "inductor_mode", "memory_budget", "outputs", "profile", "step_kernel",
    "tile_megabytes", "unroll",
)  # fmt: skip
WRONG = {
    "agreement_timeout_seconds": ["60", 0, float("nan"), True, None],
    "check_overlap": [1, None],
    "check_ranks": [-1, True, False, 1.0, 10_001, "every"],
    "eager_strategy": ["ulysses", "split_kv", "auto"],
    "fold_repeated_blocks": [0, None, "auto"],
    "gather_outputs_megabytes": [-1, True, False, "no", float("nan")],
    "gradient_bucket_megabytes": [-1, True, "25"],
    "hardware": [3, ""],
    "inductor_mode": ["", 3, True],
    "memory_budget": [0, -1, 1e9, True, "1GB"],
    "offload_activations": [1, "cpu", None],
    "outputs": [[], "loss", [1], {"loss"}],
    "profile": ["", 3, True],
    "step_kernel": [["triton"], "cudnn"],
    "tie_fraction": [None, -0.1],
    "tile_least_megabytes": [0, None],
    "tile_megabytes": [0, -1, True],
    "unroll": [-1, True, 2.0, "always", [2]],
    "whole_mask_share": [-0.5, "auto"],
}
NEEDED = {
    "agreement_timeout_seconds": "a positive number of seconds",
    "check_overlap": "True or False",
    "check_ranks": '"auto", "first", or a number of calls up to 10000, 0 for never',
    "eager_strategy": "one of 'ring', 'all_gather'",
    "fold_repeated_blocks": "True or False",
    "gather_outputs_megabytes": '"auto" or a number of megabytes, 0 for none, '
    "math.inf for all",
    "gradient_bucket_megabytes": '"auto" or a number of megabytes, 0 for none',
    "hardware": '"auto", the name of a profile, or the path of a .json file',
    "inductor_mode": '"auto" or the name of a mode of Inductor',
    "memory_budget": '"auto" or a positive number of bytes',
    "offload_activations": "True or False",
    "outputs": '"auto" or a list of names of results',
    "profile": "None or a path",
    "step_kernel": "one of 'auto', 'triton', 'aten_flash', 'aten_math'",
    "tie_fraction": "a number that is not negative, such as 0.05",
    "tile_least_megabytes": "a positive number of megabytes",
    "tile_megabytes": '"auto" or a positive number of megabytes',
    "unroll": '"auto" or a number of ranks, 0 for never',
    "whole_mask_share": "a number that is not negative, such as 0.05",
}


def test_every_setting_has_a_rule_that_its_default_meets():
    names = {*config.get_config_copy()} - {"TYPE_CHECKING"}
    assert {*setting_names()} == names == {*WRONG} == {*NEEDED}
    for name in names:
        default = getattr(config, name)
        assert setting(name) == (None if name in AUTOMATIC else default)


@pytest.mark.parametrize("name", AUTOMATIC)
@pytest.mark.parametrize("value", ["auto", None])
def test_auto_and_none_are_the_default(name, value):
    with config.patch({name: value}):
        assert setting(name) is None


@pytest.mark.parametrize("limit", [0, 1, 64])
def test_zero_is_a_limit_of_its_own(limit):
    """And not the absence of one."""
    with config.patch(unroll=limit, check_ranks=limit):
        assert setting("unroll") == setting("check_ranks") == limit


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values],
)
def test_wrong_values(name, value):
    with config.patch({name: value}), pytest.raises(OptionError) as caught:
        setting(name)
    assert str(caught.value) == (
        f"cpcompile.config.{name} is {value!r}; needed {NEEDED[name]}"
    )


def attend(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_program_keeps_the_settings_of_its_first_call():
    """Another length is another program, and after a reset so is every length."""
    torch._dynamo.reset()
    short, long = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 12, 4)
    with fake_mesh(2) as mesh:
        options = {"mesh": mesh, "inner": "aot_eager", "shard": {"x": 2}}
        call = torch.compile(attend, backend="cp", options=options, dynamic=False)
        call(short)
        with config.patch(memory_budget=1):
            with recording() as reports:
                call(short)
            assert [x.plan is not None for x in reports[0].calls] == [True]
            for forget, x in ((lambda: None, long), (torch.compiler.reset, short)):
                forget()
                with pytest.raises(BackendCompilerFailed, match="the smallest need"):
                    call(x)


@pytest.fixture
def threshold():
    before = gc.get_threshold()
    yield gc.set_threshold
    gc.set_threshold(*before)


def test_looks_rarely_inside_and_as_before_after_an_error(threshold):
    threshold(700, 11, 12)
    with pytest.raises(KeyError), gc_paused():
        assert gc.get_threshold() == (50_000, 11, 12)
        with gc_paused():
            pass
        assert gc.get_threshold() == (50_000, 11, 12)
        raise KeyError
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("mine", [(0, 10, 10), (80_000, 10, 10)])
def test_what_the_user_has_set_higher_stays(threshold, mine):
    threshold(*mine)
    with gc_paused():
        assert gc.get_threshold() == mine


def leaf(n):
    return n


def faults(depth, calls=500):
    """Page faults of so many calls at a depth of the stack."""
    if depth:
        return faults(depth - 1, calls)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for n in range(calls):
        leaf(n)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_no_depth_maps_memory_in_each_call():
    found = with_large_stack(lambda: [faults(depth) for depth in range(400)])
    assert max(found) < 250  # 500 and more where a piece of the stack ends


def test_results_and_errors_pass():
    assert with_large_stack(lambda: with_large_stack(lambda: 3)) == 3
    with pytest.raises(KeyError, match="x"):
        with_large_stack(lambda: {}["x"])
