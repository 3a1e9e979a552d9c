"""cp.shard with a layout: what each rank gets, and how the layout is remembered."""

from collections.abc import Iterator
from textwrap import fill

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import cpcompile as cp
from cpcompile import logs
from cpcompile.errors import InputError
from cpcompile.frontend.inputs import given_layout
from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.options import Options
from cpcompile.passes.graph.context import GraphInput, InputKind
from cpcompile.ranks import layout_marks
from cpcompile.ranks.layout_marks import layout_of, layouts_in_use
from tests.golden.capture import fake_mesh, warnings
from tests.support.pairwise import in_pairs

RANKS = 4
BALANCED = [Layout.ZIGZAG, Layout.STRIPED, Layout.FOLD]


@pytest.fixture(params=range(RANKS))
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Each rank in turn of a mesh (cp=4) that exchanges nothing."""
    with fake_mesh(RANKS, rank=request.param) as mesh:
        yield mesh


@pytest.fixture(autouse=True)
def unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layout was marked before."""
    monkeypatch.setattr(layout_marks, "_layouts", set())


@in_pairs({"layout": tuple(Layout), "length": [8, 7, 5, 2], "dim": [0, 1, -1]})
def test_every_rank_has_its_tokens(mesh, layout, length, dim):
    shape = [2, 3, 2]
    shape[dim] = length
    x = torch.randn(shape)
    y = cp.shard(x, mesh, dim, layout=layout.value)
    mine = TokenLayout.of(layout, length, RANKS).positions(mesh.get_rank())
    assert y.placements == (Shard(dim % 3),) and y.shape == x.shape
    assert torch.equal(y.to_local(), x.index_select(dim, mine))
    assert layout_of(y) is layout


def test_on_one_of_two_axes():
    with fake_mesh(2, 2, names=("dp", "cp")) as mesh:
        y = cp.shard(torch.arange(8), mesh, 0, layout="zigzag")
        assert y.placements == (Replicate(), Shard(0))
        assert y.to_local().tolist() == [2, 3, 4, 5]
        y = cp.shard(torch.arange(8), mesh, 0, ("dp", "cp"), "fold")
        assert y.placements == (Shard(0),) and y.to_local().tolist() == [1, 6]


@pytest.mark.parametrize("layout", Layout)
def test_there_and_back(one_rank, layout):
    x = torch.randn(2, 5, 3, requires_grad=True)
    y = cp.unshard(cp.shard(x, one_rank, 1, layout=layout.value))
    assert torch.equal(y, x)
    grad = torch.randn_like(x)
    y.backward(grad)
    assert torch.equal(x.grad, grad)


@pytest.mark.parametrize("layout", ["zig-zag", "auto", "", None, Layout.ZIGZAG])
def test_no_such_layout(one_rank, layout):
    with pytest.raises(InputError) as caught:
        cp.shard(torch.ones(4), one_rank, 0, layout=layout)
    assert str(caught.value) == (
        f"cp.shard: got layout {layout!r}; needed one of 'contiguous', 'zigzag', "
        "'striped', 'fold'"
    )


def test_what_was_not_marked_is_contiguous(one_rank):
    """Among that are results of operators on what was."""
    x = torch.ones(4)
    whole = DTensor.from_local(x, one_rank, [Replicate()], run_check=False)
    marked = cp.shard(x, one_rank, 0, layout="fold")
    for other in (x, whole, marked * 2, marked.detach(), cp.shard(x, one_rank, 0)):
        assert layout_of(other) is Layout.CONTIGUOUS
    assert layout_of(marked) is Layout.FOLD


def test_layouts_that_were_marked(one_rank):
    for layout in ("contiguous", "zigzag", "fold", "zigzag"):
        cp.shard(torch.ones(4), one_rank, 0, layout=layout)
    assert layouts_in_use() == ["fold", "zigzag"]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("causal", [True, False])
def test_causal_attention_in_eager_warns(one_rank, caplog, layout, causal):
    """Only what is compiled reads the mark."""
    logs.warn_once.cache_clear()
    x = cp.shard(torch.randn(1, 2, 4, 8), one_rank, 2, layout=layout.value)
    F.scaled_dot_product_attention(x, x, x, is_causal=causal)
    texts = warnings(caplog)
    if not causal or layout is Layout.CONTIGUOUS:
        assert texts == []
        return
    (text,) = texts
    assert text == (
        "causal attention on a DTensor outside of a compiled graph takes tokens in "
        f"order, and cp.shard made some in layout ['{layout.value}']: results that "
        "come from those are wrong; compile what reads them"
    )


def given(*layouts: Layout, wanted: Layout | None = None) -> Layout | None:
    """given_layout of inputs in these layouts, and an option."""
    inputs = {
        number: GraphInput(InputKind.DTENSOR, layout=layout, tokens=8)
        for number, layout in enumerate(layouts)
    }
    return given_layout(inputs, Options(layout=wanted))


@pytest.mark.parametrize("layout", BALANCED)
def test_the_layout_of_inputs_is_that_of_the_graph(layout):
    assert given(layout) is given(layout, layout) is layout
    assert given(layout, Layout.CONTIGUOUS) is layout
    assert given(layout, wanted=layout) is layout
    assert given(Layout.CONTIGUOUS, wanted=layout) is layout
    assert given(Layout.CONTIGUOUS) is given() is None
    assert given(wanted=Layout.CONTIGUOUS) is Layout.CONTIGUOUS


@pytest.mark.parametrize("wanted", [None, Layout.STRIPED])
def test_two_layouts_are_refused(wanted):
    layouts = [Layout.ZIGZAG, Layout.STRIPED][: 1 if wanted else 2]
    with pytest.raises(InputError) as caught:
        given(*layouts, wanted=wanted)
    assert_expected_inline(
        fill(str(caught.value), 80),
        """\
tokens are given and wanted in the layouts striped and zigzag; needed one: leave
options['layout'] away, and pass one layout to cp.shard""",
    )


def test_inputs_in_a_layout_cannot_be_contiguous():
    with pytest.raises(InputError, match="layouts contiguous and fold; needed one"):
        given(Layout.FOLD, wanted=Layout.CONTIGUOUS)
