"""cp.shard and cp.unshard: what each rank gets, and how a layout is remembered."""

from collections.abc import Iterator
from textwrap import fill

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import cpcompile as cp
from cpcompile import logs
from cpcompile.errors import InputError
from cpcompile.frontend.inputs import given_layout
from cpcompile.geometry.layout import Layout, TokenLayout
from cpcompile.options import Options
from cpcompile.passes.graph.context import GraphInput, InputKind
from cpcompile.ranks import layout_marks
from cpcompile.ranks.layout_marks import layout_of, layouts_in_use
from cpcompile.ranks.shardings import (
    axis_index,
    check_dim,
    is_sequence_sharded,
    placements_text,
)
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
    if layout is Layout.CONTIGUOUS:
        ranks = (length, mesh.size(), mesh.get_rank())
        count, start = Shard.local_shard_size_and_offset(*ranks)
        assert torch.equal(y.to_local(), x.narrow(dim, min(start, length), count))
    y.to_local().zero_()
    assert x.all(), "a part of the original"
    assert layout_of(y) is layout


def test_one_of_two_axes(mesh_2d):
    with fake_mesh(2, 2, names=("dp", "cp")) as mesh:
        y = cp.shard(torch.arange(8), mesh, 0, layout="zigzag")
        assert y.placements == (Replicate(), Shard(0))
        assert y.to_local().tolist() == [2, 3, 4, 5]
        y = cp.shard(torch.arange(8), mesh, 0, ("dp", "cp"), "fold")
        assert y.placements == (Shard(0),) and y.to_local().tolist() == [1, 6]
    y = cp.shard(torch.arange(6), mesh_2d, 0)
    assert y.placements == (Replicate(), Shard(0))
    assert y.to_local().tolist() == [3, 4, 5]
    y = cp.shard(torch.arange(6), mesh_2d, 0, axis="dp")
    assert y.placements == (Shard(0), Replicate())
    assert y.to_local().tolist() == [0, 1, 2]


@pytest.mark.parametrize("layout", Layout)
def test_there_and_back(one_rank, layout):
    x = torch.randn(2, 5, 3, requires_grad=True)
    y = cp.unshard(cp.shard(x, one_rank, 1, layout=layout.value))
    assert not isinstance(y, DTensor) and torch.equal(y, x)
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
    for layout in ("contiguous", "zigzag", "zigzag"):
        cp.shard(x, one_rank, 0, layout=layout)
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


@pytest.fixture
def mesh_2d() -> Iterator[DeviceMesh]:
    """Rank 1 of a mesh (dp=2, cp=2)."""
    with fake_mesh(2, 2, names=("dp", "cp")) as mesh:
        yield mesh


def rejected(call, *args, **kwargs):
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_shard_and_unshard_of_other_values(mesh):
    sharded = cp.shard(torch.ones(8), mesh, 0)
    for x in ([1, 2], 3, None, sharded):
        text = rejected(cp.shard, x, mesh, 0)
        assert text == f"cp.shard: got a {type(x).__name__}; needed a plain full tensor"
    assert rejected(cp.unshard, torch.ones(2)) == (
        "cp.unshard: got a Tensor; needed a DTensor, as cp.shard makes"
    )
    rejected(cp.shard, torch.tensor(1.0), mesh, 0)


@pytest.mark.parametrize("dim", [2, -3, 7])
def test_dim_out_of_range(mesh, dim):
    assert rejected(cp.shard, torch.ones(2, 8), mesh, dim) == (
        f"cp.shard: got dim {dim} for a tensor of shape (2, 8); "
        "needed a dimension from -2 to 1"
    )


def local(mesh, *placements):
    return DTensor.from_local(torch.ones(2, 3), mesh, placements, run_check=False)


def test_placements(mesh_2d):
    x, partial = (
        local(mesh_2d, *y) for y in ((Replicate(), Shard(1)), (Partial(), Replicate()))
    )
    assert placements_text(local(mesh_2d, Shard(0), Replicate())) == "S(0),R"
    assert placements_text(local(mesh_2d, Partial(), Shard(1))) == "P(sum),S(1)"
    assert placements_text(torch.ones(2)) == "plain"
    assert [is_sequence_sharded(x, axis) for axis in (0, 1)] == [False, True]
    assert not is_sequence_sharded(partial, 1)
    assert not is_sequence_sharded(torch.ones(2, 3), 1)
    assert [axis_index(mesh_2d, axis) for axis in ("dp", "cp")] == [0, 1]
    one_axis = init_device_mesh("cpu", (4,))
    assert axis_index(one_axis, "anything") == 0
    assert [check_dim("here", x, dim) for dim in (-2, -1, 0, 1)] == [0, 1, 0, 1]
