"""Every option is checked by name and by type, and the text says how to fix it."""

from textwrap import fill

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.exc import BackendCompilerFailed

from cpcompile import config
from cpcompile.cost.mixer_plan import MixerStrategy
from cpcompile.cost.plans import Strategy
from cpcompile.errors import OptionError
from cpcompile.geometry.layout import Layout
from cpcompile.options import GradSync, Options, parse_options

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


def test_the_mode_of_inductor_comes_from_torch_compile_or_from_its_setting():
    assert parse_options(None).mode is None
    assert parse_options(None, "max-autotune").mode == "max-autotune"
    with config.patch(inductor_mode="max-autotune"):
        assert parse_options({"strict": False}).mode == "max-autotune"


def test_what_computes_nothing_needs_no_inductor():
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


WRONG = {
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
NEEDED = {
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
    [(name, value) for name, values in WRONG.items() for value in values],
)
def test_wrong_value(name, value):
    assert message({name: value}) == (
        f'option {name!r} of backend="cp": got {value!r}; needed {NEEDED[name]}.'
    )


def test_every_option_has_a_wrong_value_here():
    set_by_others = ("local_view", "mixers", "mode", "computes")
    fields = [x for x in Options.__dataclass_fields__ if x not in set_by_others]
    assert list(WRONG) == list(NEEDED) == fields


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
