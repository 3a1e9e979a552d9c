"""Values that are cut are made of the tokens that are read; and what stays."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from cpcompile.passes.joint.tiling.sink_slices import sink
from tests.golden.golden_text import assert_golden
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
    assert_golden(
        after,
        """\
arange = arange(96,)  # [96]
index_select_default = index_select(arange, 0, arg1_1)  # [4]
unsqueeze_default = unsqueeze(index_select_default, 0)  # [1, 4]
unsqueeze_default_1 = unsqueeze(unsqueeze_default, 2)  # [1, 4, 1]
_to_copy_default = _to_copy(unsqueeze_default_1,)  # [1, 4, 1]
mul_tensor = mul(_to_copy_default, arg0_1)  # [1, 4, 8]
cat_default = cat([mul_tensor, mul_tensor], -1)  # [1, 4, 16]
cos_default = cos(cat_default,)  # [1, 4, 16]
reshape_default = reshape(cos_default, [1, 1, 4, 16])  # [1, 1, 4, 16]
mul_1 = mul(arg2_1, reshape_default)  # [1, 1, 4, 16]
flip = flip(arg2_1, [-1])  # [1, 1, 4, 16]
sin_default = sin(cat_default,)  # [1, 4, 16]
reshape_default_1 = reshape(sin_default, [1, 1, 4, 16])  # [1, 1, 4, 16]
mul_2 = mul(flip, reshape_default_1)  # [1, 1, 4, 16]
add = add(mul_1, mul_2)  # [1, 1, 4, 16]
output = ((add,),)""",
    )


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
