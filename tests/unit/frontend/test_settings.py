"""A wrong setting or option is said with its name, and how to fix it."""

import gc
from textwrap import fill

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.exc import BackendCompilerFailed

from cpcompile import config
from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.cost.plans import Strategy
from cpcompile.errors import OptionError
from cpcompile.frontend.interpreter_state import gc_paused
from cpcompile.geometry.layout import Layout
from cpcompile.options import GradSync, Options, parse_options
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


def test_every_name_has_a_rule_and_a_wrong_value():
    names = {*config.get_config_copy()} - {"TYPE_CHECKING"}
    assert {*setting_names()} == names == {*WRONG} == {*NEEDED}
    for name in names:
        default = getattr(config, name)
        assert setting(name) == (None if name in AUTOMATIC else default)
    set_by_others = ("local_view", "mixers", "mode", "computes")
    fields = [x for x in Options.__dataclass_fields__ if x not in set_by_others]
    assert list(WRONG_OPTIONS) == list(NEEDED_OPTIONS) == fields


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


MESH_AXES = {"cp": 2}


def message(given):
    with pytest.raises(OptionError) as caught:
        parse_options(given)
    return str(caught.value)


@pytest.mark.parametrize("given", [None, {}])
def test_defaults(given):
    assert parse_options(given) == Options(
        mesh=None,
        axis="cp",
        shard={},
        strategy=None,
        layout=None,
        strict=True,
        inner="inductor",
        grad_sync=None,
        tile=None,
        activation_memory=None,
    )


GIVEN = {
    "axis": ("ring", "ulysses"), "shard": {"tokens": 1, "batch.labels": -1},
    "strategy": "hybrid", "layout": "striped", "strict": False, "inner": "aot_eager",
    "grad_sync": "none", "tile": 9, "activation_memory": 0.5,
}  # fmt: skip


def test_every_option_arrives(mesh):
    given = {"mesh": mesh, **GIVEN}
    copy = dict(given)
    parsed = parse_options(given)
    assert given == copy
    chosen = {"strategy": Strategy.HYBRID, "layout": Layout.STRIPED}
    assert parsed == Options(**(given | chosen | {"grad_sync": GradSync.NONE}))


DEFAULTS = {
    "mesh": None, "strategy": "auto", "layout": "auto", "grad_sync": "auto",
    "tile": None, "activation_memory": None,
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_can_be_said(name):
    """Names are texts, and "auto" is one of them; None stands for no number."""
    assert parse_options({name: DEFAULTS[name]}) == parse_options(None)
    for layout in Layout:  # contiguous is a choice, and not the absence of one
        assert parse_options({"layout": layout.value}).layout is layout


def test_who_compiles():
    assert parse_options(None).mode is None
    assert parse_options(None, "max-autotune").mode == "max-autotune"
    with config.patch(inductor_mode="max-autotune"):
        assert parse_options({"strict": False}).mode == "max-autotune"
    assert parse_options({"inner": "inductor"}, computes=False).inner == "aot_eager"


def test_unknown_name():
    assert_expected_inline(
        fill(message({"colour": "red"}), 80),
        """\
unknown option 'colour' of backend="cp". The options are: activation_memory,
axis, grad_sync, inner, layout, mesh, shard, strategy, strict, tile.""",
    )


@pytest.mark.parametrize("name", ["check_ranks", "outputs", "inductor_mode"])
def test_a_setting_is_no_option(name):
    assert message({name: 1}) == (
        f'unknown option {name!r} of backend="cp": it is a setting, cpcompile.config.'
        f"{name} = ..., or `with cpcompile.config.patch({name}=...):` around the call "
        "that compiles"
    )


WRONG_OPTIONS = {
    "mesh": ["cp", "auto", 4],
    "axis": [0, None, (), ("cp",), ("cp", "cp"), ("a", 1), ["ring", "ulysses"]],
    "shard": [["tokens"], {"tokens": "1"}, {"tokens": True}, {0: 1}, None],
    "strategy": ["rings", "", None, Strategy.RING, {"mixers": "states"},
                 "ring, ulysses", "states, gather", "ring states"],
    "layout": ["zig-zag", Layout.ZIGZAG, 1, None],
    "strict": [1, "yes", None],
    "inner": ["eager", "shapes", None],
    "grad_sync": [True, "sum", None],
    "tile": [-1, 2.5, "auto", "8", True, False],
    "activation_memory": [0, 1, -1, -0.1, True, "auto", "1GB", float("inf")],
}  # fmt: skip
NEEDED_OPTIONS = {
    "mesh": "None or a DeviceMesh",
    "axis": "the name of a mesh axis, or a tuple of two names",
    "shard": "a dict {argument name: dimension}",
    "strategy": "one of 'auto', 'ring', 'all_gather', 'ulysses', 'hybrid', 'latents', "
    "'exchange', 'states', 'gather', or one of attention and one of mixers: "
    "'ring, states'",
    "layout": "one of 'auto', 'contiguous', 'zigzag', 'striped', 'fold'",
    "strict": "True or False",
    "inner": "one of 'inductor', 'aot_eager'",
    "grad_sync": "one of 'auto', 'reduce', 'none', 'average'",
    "tile": "None or a number of tokens, 0 for never",
    "activation_memory": "None or a fraction from 0.0 to 1.0, or a larger number of "
    "bytes",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG_OPTIONS.items() for value in values],
)
def test_wrong_value(name, value):
    assert message({name: value}) == (
        f'option {name!r} of backend="cp": got {value!r}; needed '
        f"{NEEDED_OPTIONS[name]}."
    )


@pytest.mark.parametrize(
    ("given", "attention", "mixers"),
    [
        *((x, Strategy(x), None) for x in ("ring", "all_gather", "ulysses", "hybrid")),
        ("auto", None, None),
        ("states", None, MixerStrategy.STATES),
        ("ulysses, exchange", Strategy.ULYSSES, MixerStrategy.EXCHANGE),
        ("gather,ring", Strategy.RING, MixerStrategy.GATHER),
        ("auto, states", None, MixerStrategy.STATES),
        ("auto, auto", None, None),
    ],
)
def test_strategies_of_attention_and_of_mixers(given, attention, mixers):
    parsed = parse_options({"strategy": given})
    assert (parsed.strategy, parsed.mixers) == (attention, mixers)


def compile_error(**arguments):
    """What reaches the user of torch.compile."""
    compiled = torch.compile(lambda x: x + 1, backend="cp", **arguments)
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(torch.ones(2))
    return str(caught.value).split("\n\n")[0]


@pytest.mark.parametrize("options", [[1], "mesh", {"mesh"}, 7])
def test_options_that_are_no_dict(options):
    assert compile_error(options=options) == (
        f"backend='cp' raised:\nOptionError: options of backend=\"cp\": got "
        f'{options!r}; needed a dict, such as {{"mesh": mesh}}'
    )


def test_fingerprints_tell_options_apart(mesh):
    """A mesh is described by names and sizes, a dict in any order."""
    given = {**GIVEN, "mesh": mesh}
    fingerprint = lambda given: parse_options(given).fingerprint()  # noqa: E731
    texts = {fingerprint({name: value}) for name, value in given.items()}
    assert len(texts | {fingerprint(None)}) == len(given) + 1
    assert fingerprint(given) == fingerprint(dict(reversed(given.items())))
    assert "0x" not in fingerprint(given)
