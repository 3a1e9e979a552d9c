"""Values that are cut are made of the tokens that are read; and what stays."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from cpcompile.passes.joint.tiling.sink_slices import sink
from tests.golden.tiling.test_tile_tokens import text

S, D = 96, 8
MINE = torch.tensor([3, 1, 70, 71])


def cut(fn, *inputs, least=64):
    """(number, graph before, graph after, result) of a function without gradients."""
    found = []

    def compiler(gm, _):
        before = text(gm.graph)
        number = sink(gm.graph, least)
        gm.recompile()
        found.append((number, before, text(gm.graph)))
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, inference_compiler=compiler)
    with torch.no_grad():
        result = torch.compile(fn, backend=backend, fullgraph=True)(*inputs)
        torch.testing.assert_close(result, fn(*inputs), rtol=0, atol=0)
    (one,) = found
    return one


def rotary(x, frequencies, mine):
    positions = torch.arange(S)[None]
    angles = positions[:, :, None].float() * frequencies
    both = torch.cat([angles, angles], -1)
    return x * both.cos().view(1, 1, S, 2 * D).index_select(2, mine) + x.flip(
        -1
    ) * both.sin().view(1, 1, S, 2 * D).index_select(2, mine)


def test_tables_by_position():
    x, frequencies = torch.randn(1, 1, len(MINE), 2 * D), torch.rand(D)
    number, _, after = cut(rotary, x, frequencies, MINE)
    assert number == 2
    whole = [x for x in after.splitlines() if "96" in x]
    assert whole == ["arange = arange(96,)  # [96]"]


def cut_once(x):
    return ((x * 2).exp()[:30],)


def read_whole(x):
    y = x.exp()
    return y[:30], y.sum()


def along_tokens(x):
    return (x.cumsum(0) * 2)[:30]


def all_parts(x):
    y = x.exp()
    return y[:48] + y[48:]


def in_steps(x):
    return x.exp()[:60:3]


@pytest.mark.parametrize("fn", [read_whole, all_parts, in_steps])
def test_what_is_read_elsewhere_or_as_a_whole_stays(fn):
    number, before, after = cut(fn, torch.randn(S, D))
    assert number == 0 and before == after


def test_what_is_not_token_wise_is_made_whole():
    number, _, after = cut(along_tokens, torch.randn(S, D))
    assert number == 1
    (line,) = [x for x in after.splitlines() if "= mul(" in x]
    assert line.endswith("# [30, 8]")
    (line,) = [x for x in after.splitlines() if "= cumsum(" in x]
    assert line.endswith("# [96, 8]")


def test_small_values_stay():
    number, before, after = cut(cut_once, torch.randn(S, D), least=S * D * 4 + 1)
    assert number == 0 and before == after
    assert cut(cut_once, torch.randn(S, D))[0] == 1
