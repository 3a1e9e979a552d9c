"""Compiled functions whose inputs are DTensors in a layout that the user chose.

The reference is one process in float64; see Note [Derived bounds] in
tests/support/bounds.py.
"""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Replicate

import cpcompile as cp
from cpcompile.geometry.layout import Layout
from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.on_ranks import on_ranks
from tests.cpu.one_call import message_of
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


@pytest.mark.parametrize("layout", [x.value for x in Layout])
@on_ranks(RANKS)
def test_there_and_back(layout):
    mesh = sequence_mesh(RANKS)
    for length in (*LENGTHS, 4, 2):
        x, grad = data(length)
        for dim in (1, -2):
            leaf = x.clone().requires_grad_()
            y = cp.unshard(cp.shard(leaf, mesh, dim, layout=layout))
            assert torch.equal(y, x)
            y.backward(grad)
            assert torch.equal(leaf.grad, grad)


NO_RING = {"strict": False, "memory_budget": 1}  # one byte is too little


@pytest.mark.parametrize(
    ("fn", "length", "layout", "options"),
    [
        (layers, 12, "zigzag", {}),
        (layers, 13, "fold", {}),
        (layers, 11, "striped", {}),
        (summed, 13, "zigzag", {}),
        (mixed, 12, "striped", {}),
        (finer, 12, "striped", {}),
        (coarser, 12, "fold", {}),
        (untouched, 13, "fold", {}),
        (masked, 12, "striped", {}),
        (masked, 13, "zigzag", {}),
        (summed, 12, "zigzag", NO_RING),
        (summed, 13, "fold", NO_RING),
    ],
)
@on_ranks(RANKS)
def test_results_and_gradients(fn, length, layout, options):
    x, _ = data(length)
    given, settings = split(options)
    with recording() as reports, settings:
        check(compared(compiled(fn, **given), fn, x, layout))
    (report,) = reports
    layouts = [c.plan.layout.value for c in report.calls if c.plan]
    if fn is masked:
        under_mask = layout if layout == "zigzag" else "contiguous"
        assert layouts == [layout, under_mask, layout]
    else:
        if fn is not finer:  # whose pairs of tokens are in order
            assert set(layouts) <= {layout}
        assert bool(layouts) == (fn is not untouched and not options)


@pytest.mark.parametrize(
    ("fn", "length"),
    [(finer, 12), (coarser, 12), (as_many_as_tokens, 6), (one_table_twice, 8)],
)
@on_ranks(RANKS)
def test_plain_inputs_with_sizes_like_that_of_tokens(fn, length):
    """What is as large as the sequence, or twice, is not the sequence."""
    options = {"mesh": sequence_mesh(RANKS), "shard": {"x": 1}, "layout": "striped"}
    check(compared(compiled(fn, **options), fn, data(length)[0], None))


@on_ranks(RANKS)
def test_another_layout_is_compiled_anew():
    """One compiled function, called with every layout in turn."""
    x, _ = data(12)
    step = compiled(layers)
    found, graphs = [], []
    for layout in ("zigzag", "striped", "contiguous", "zigzag", "fold", "contiguous"):
        before = counters["stats"]["unique_graphs"]
        found += compared(step, layers, x, layout)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    check(found)
    assert graphs == [1, 1, 1, 0, 1, 0]


def two(x, y):
    return attend(x) + 1, (y * 2).cumsum(1), attend(y).mean()


@pytest.mark.parametrize(
    ("first", "second"),
    [("striped", "striped"), ("fold", "contiguous"), ("contiguous", "zigzag")],
)
@on_ranks(RANKS)
def test_two_sequences(first, second):
    mesh, (x, _), (y, _) = sequence_mesh(RANKS), data(12), data(20, seed=1)
    given = cp.shard(x, mesh, 1, layout=first), cp.shard(y, mesh, 1, layout=second)
    pairs = zip(compiled(two)(*given), two(x, y), strict=True)
    check([deviation(f"result {n}", *each) for n, each in enumerate(pairs)])


@on_ranks(RANKS)
def test_a_sequence_twice_as_long_is_refused():
    """Pairs of tokens of one could not be told from tokens of the other."""
    mesh, (x, _), (y, _) = sequence_mesh(RANKS), data(12), data(24, seed=1)
    given = cp.shard(x, mesh, 1), cp.shard(y, mesh, 1, layout="zigzag")
    text = message_of(lambda: compiled(two)(*given))
    assert "layout zigzag: inputs are in it" in text and "use contiguous inputs" in text


def gathered_inside(x):
    y = attend(x)
    if isinstance(y, DTensor):
        y = y.redistribute(placements=[Replicate()]).full_tensor()
    return y * 2, attend(x).mean()


@pytest.mark.parametrize("length", [12, 13])
@on_ranks(RANKS)
def test_models_may_gather(length):
    x, _ = data(length)
    step = compiled(gathered_inside)
    check(compared(step, gathered_inside, x, "striped"))
    whole, _ = step(cp.shard(x, sequence_mesh(RANKS), 1, layout="zigzag"))
    assert not isinstance(whole, DTensor)
    check([deviation("whole", whole, gathered_inside(x)[0])])


def local(x):
    return attend(x.to_local())


@on_ranks(RANKS)
def test_local_parts_inside_are_refused():
    mesh, (x, _) = sequence_mesh(RANKS), data(12)
    text = message_of(lambda: compiled(local)(cp.shard(x, mesh, 1)))
    assert "to_local at" in text and "or call full_tensor()" in text


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("layouts", "options", "names"),
    [
        (("zigzag", "striped"), {}, "striped and zigzag"),
        (("zigzag", "zigzag"), {"layout": "fold"}, "fold and zigzag"),
        (("fold", "contiguous"), {"layout": "contiguous"}, "contiguous and fold"),
    ],
)
@on_ranks(RANKS)
def test_two_layouts_are_refused(layouts, options, names, strict):
    mesh, (x, _) = sequence_mesh(RANKS), data(12)
    given = [cp.shard(x, mesh, 1, layout=layout) for layout in layouts]
    call = compiled(lambda x, y: attend(x) + y, **options, strict=strict)
    text = message_of(lambda: call(*given))
    assert f"are given and wanted in the layouts {names}; needed one" in text
