"""Compiled functions whose inputs are DTensors in a layout that the user chose.

The reference is one process in float64; see Note [Derived bounds] in
tests/support/bounds.py.
"""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

import cpcompile as cp
from cpcompile.geometry.layout import Layout
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import Deviation, check, deviation, deviations
from tests.support.settings import split

RANKS = 3
LENGTHS = [12, 13, 11]
sdpa = F.scaled_dot_product_attention


def attend(x, mask=None):
    """Attention of x [B, S, C] to itself, with two heads; causal without a mask."""
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    y = sdpa(q, q, q, attn_mask=mask, is_causal=mask is None)
    return y.transpose(1, 2).flatten(2)


def layers(x):
    """Tokens know where they are by a table, and mix in attention only."""
    positions = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None]
    return attend(attend(x * positions).tanh() + x)


def summed(x):
    """Results without tokens."""
    return layers(x).square().sum(1), attend(x).mean()


def mixed(x):
    """Sums over the tokens before, by either name of their dimension."""
    return attend(attend(x).cumsum(1)) + attend(x).cumsum(-2)


def masked(x):
    """A window: the operators take it in zigzag, and else in order."""
    length = x.shape[1]
    near = torch.ones(length, length, dtype=torch.bool).tril().triu(-3)
    return attend(attend(x) + attend(x, near))


def finer(x):
    """Half as long tokens, twice as many: a sequence of its own."""
    return attend(attend(x).reshape(x.shape[0], 2 * x.shape[1], -1))


def coarser(x):
    """Two tokens become one, and attention comes before that too."""
    return attend(attend(x).reshape(x.shape[0], x.shape[1] // 2, -1))


def as_many_as_tokens(x):
    """A batch of the size of the sequence, and split on it."""
    first, second = attend(x.repeat(x.shape[1] // 2, 1, 1)).chunk(2, 1)
    return attend(torch.cat([second, first], 1))


def one_table_twice(x):
    """As many channels as tokens, scaled by one table of both."""
    table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
    return attend(torch.einsum("bsd,s,d->bsd", attend(x), table, table))


def untouched(x):
    """No attention at all."""
    return x * 2, x.sum(1)


def data(length, channels=8, seed=0):
    """x and a gradient [2, length, channels], the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 2, length, channels)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def compiled(fn, **options):
    """Compiled for DTensor inputs."""
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "strategy": "ring"} | options
    return torch.compile(fn, backend="cp", options=options, dynamic=False)


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def compared(step, fn, x, layout) -> list[Deviation]:
    """Deviations of the results of step, and of the gradient of x.

    layout: of the input; None gives it plain and full.
    """

    def values(call, layout=None):
        leaf = given = x.clone().requires_grad_()
        if layout is not None:
            given = cp.shard(leaf, sequence_mesh(RANKS), 1, layout=layout)
        got = [
            y.full_tensor() if isinstance(y, DTensor) else y
            for y in as_tuple(call(given))
        ]
        sum(n * y.square().sum() for n, y in enumerate(got, start=1)).backward()
        results = {f"result {n}": y for n, y in enumerate(got)}
        return results | {"grad of x": leaf.grad}

    return deviations(values(step, layout), values(fn))


def run_round_trip(layout):
    mesh = sequence_mesh(RANKS)
    for length in (*LENGTHS, 4, 2):
        x, grad = data(length)
        for dim in (1, -2):
            leaf = x.clone().requires_grad_()
            y = cp.unshard(cp.shard(leaf, mesh, dim, layout=layout))
            assert torch.equal(y, x)
            y.backward(grad)
            assert torch.equal(leaf.grad, grad)


@pytest.mark.parametrize("layout", [x.value for x in Layout])
def test_there_and_back(pools, layout):
    pools[RANKS].run(run_round_trip, layout)


def run_function(fn, length, layout, options):
    x, _ = data(length)
    options, settings = split(options)
    with recording() as reports, settings:
        found = compared(compiled(fn, **options), fn, x, layout)
    (report,) = reports
    return found, [c.plan.layout.value for c in report.calls if c.plan]


@pytest.mark.parametrize(
    ("fn", "length", "layout"),
    [
        (layers, 12, "zigzag"),
        (layers, 13, "fold"),
        (layers, 11, "striped"),
        (summed, 13, "zigzag"),
        (mixed, 12, "striped"),
        (finer, 12, "striped"),
        (coarser, 12, "fold"),
        (untouched, 13, "fold"),
    ],
)
def test_results_and_gradients(pools, fn, length, layout):
    for found, layouts in pools[RANKS].run(run_function, fn, length, layout, {}):
        check(found)
        assert set(layouts) <= {layout} and bool(layouts) == (fn is not untouched)


@pytest.mark.parametrize(("length", "layout"), [(12, "striped"), (13, "zigzag")])
def test_a_call_under_a_mask(pools, length, layout):
    args = (masked, length, layout, {})
    under_mask = layout if layout == "zigzag" else "contiguous"
    for found, layouts in pools[RANKS].run(run_function, *args):
        check(found)
        assert layouts == [layout, under_mask, layout]


@pytest.mark.parametrize(("length", "layout"), [(12, "zigzag"), (13, "fold")])
def test_a_graph_that_is_gathered(pools, length, layout):
    """One byte is too little for a ring."""
    args = (summed, length, layout, {"strict": False, "memory_budget": 1})
    for found, layouts in pools[RANKS].run(run_function, *args):
        check(found)
        assert layouts == []


def run_plain(fn, length, layout):
    options = {"mesh": sequence_mesh(RANKS), "shard": {"x": 1}, "layout": layout}
    return compared(compiled(fn, **options), fn, data(length)[0], None)


@pytest.mark.parametrize(
    ("fn", "length"),
    [(finer, 12), (coarser, 12), (as_many_as_tokens, 6), (one_table_twice, 8)],
)
def test_plain_inputs_with_sizes_like_that_of_tokens(pools, fn, length):
    """What is as large as the sequence, or twice, is not the sequence."""
    for found in pools[RANKS].run(run_plain, fn, length, "striped"):
        check(found)


def run_one_program():
    """One compiled function, called with every layout in turn."""
    x, _ = data(12)
    step = compiled(layers)
    found, graphs = [], []
    for layout in ("zigzag", "striped", "contiguous", "zigzag", "fold", "contiguous"):
        before = counters["stats"]["unique_graphs"]
        found += compared(step, layers, x, layout)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    return found, graphs


def test_another_layout_is_compiled_anew(pools):
    for found, graphs in pools[RANKS].run(run_one_program):
        check(found)
        assert graphs == [1, 1, 1, 0, 1, 0]


def two(x, y):
    return attend(x) + 1, (y * 2).cumsum(1), attend(y).mean()


def run_two_lengths(layout, other_layout):
    mesh, (x, _), (y, _) = sequence_mesh(RANKS), data(12), data(24, seed=1)
    given = (
        cp.shard(x, mesh, 1, layout=layout),
        cp.shard(y, mesh, 1, layout=other_layout),
    )
    pairs = zip(compiled(two)(*given), two(x, y), strict=True)
    return [deviation(f"result {n}", *each) for n, each in enumerate(pairs)]


@pytest.mark.parametrize(
    "layouts",
    [("striped", "striped"), ("fold", "contiguous"), ("contiguous", "zigzag")],
)
def test_two_sequences_of_which_one_is_twice_as_long(pools, layouts):
    for found in pools[RANKS].run(run_two_lengths, *layouts):
        check(found)


def local(x):
    return (attend(x).to_local() * 2,)


def run_local_part(layout):
    mesh, (x, _) = sequence_mesh(RANKS), data(12)
    (got,) = compiled(local)(cp.shard(x, mesh, 1, layout=layout))
    wanted = 2 * attend(x).chunk(RANKS, 1)[mesh.get_rank()]
    return [deviation("local part", got, wanted)]


def test_local_parts_are_in_order(pools):
    for found in pools[RANKS].run(run_local_part, "striped"):
        check(found)


def run_refused(layouts, options):
    mesh, (x, _) = sequence_mesh(RANKS), data(12)
    given = (cp.shard(x, mesh, 1, layout=layout) for layout in layouts)
    try:
        compiled(lambda x, y: attend(x) + y, **options)(*given)
    except Exception as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("layouts", "options", "names"),
    [
        (("zigzag", "striped"), {}, "striped and zigzag"),
        (("zigzag", "zigzag"), {"layout": "fold"}, "fold and zigzag"),
        (("fold", "contiguous"), {"layout": "contiguous"}, "contiguous and fold"),
    ],
)
def test_two_layouts_are_refused(pools, layouts, options, names, strict):
    args = (run_refused, layouts, options | {"strict": strict})
    for text in pools[RANKS].run(*args):
        assert f"are given and wanted in the layouts {names}; needed one" in text
