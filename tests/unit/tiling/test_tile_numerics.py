"""What runs in tiles gives the results and gradients of what does not."""

import copy

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support.bounds import assert_equal, check, deviations
from tests.support.forms.tiled_forms import (
    AGAIN,
    AT_ONCE,
    TOKENS,
    TWINS,
    both,
    by_token,
    dropped_mlp,
    example,
    plain,
    returned,
    upcast,
)
from tests.support.joint_graphs import tiled

NAMED = pytest.mark.parametrize("decomposed", [True, False], ids=["inductor", "eager"])


def name(form):
    return form.__name__


def values_of(call, model, x, labels, times=3.0):
    """Results and gradients, of a loss that is scaled."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(7)
    results = tree_leaves(call(x, labels))
    sum(times * r.sum() * (i + 1) for i, r in enumerate(results)).backward()
    found: dict[str, Tensor] = {
        f"result {i}": r.detach() for i, r in enumerate(results)
    }
    named = {"x": x, **dict(model.named_parameters())}
    return found | {
        f"grad of {n}": p.grad for n, p in named.items() if p.grad is not None
    }


def both_ways(form, decomposed, tile=24, **more):
    model, x, labels = example()
    model.loss = form
    compiled = tiled(model, tile, decomposed, **more)
    exact = values_of(model, model, x, labels)
    got = values_of(compiled.call, model, x, labels)
    check(deviations(got, exact))
    return compiled


@NAMED
@pytest.mark.parametrize("form", AT_ONCE, ids=name)
def test_gradients_of_a_loss_are_computed_in_the_forward(form, decomposed):
    compiled = both_ways(form, decomposed)
    assert [x.gradients_at_once for x in compiled.tiling.found] == [True]
    assert compiled.tiling.found[0].tokens == TOKENS


@NAMED
@pytest.mark.parametrize("form", [*AGAIN, by_token, both, returned], ids=name)
def test_others_compute_again_in_the_backward(form, decomposed):
    compiled = both_ways(form, decomposed)
    assert compiled.tiling.found


@NAMED
@pytest.mark.parametrize("form", TWINS, ids=name)
def test_what_mixes_tokens_has_no_tile_along_them(form, decomposed):
    compiled = both_ways(form, decomposed)
    (after,) = compiled.after
    for number, found in enumerate(compiled.tiling.found):
        if found.tokens != TOKENS:
            continue
        bodies = [
            m for n, m in after.named_children() if n.startswith(f"tile_{number}_")
        ]
        calls = [str(node.target) for body in bodies for node in body.graph.nodes]
        assert calls and not [x for x in calls if any(w in x for w in TWINS[form])]


@pytest.mark.parametrize("tile", [16, 48, 100, TOKENS])
def test_tiles_of_any_length(tile):
    compiled = both_ways(plain, True, tile)
    assert bool(compiled.tiling.found) == (tile < TOKENS)


def test_how_much_runs_in_tiles():
    compiled = both_ways(plain, True, None, tile_bytes=2**19)
    (found,) = compiled.tiling.found
    assert found.tile == 64 and found.untiled > 2**19 >= found.tiled
    found = both_ways(both, True, recompute=False).tiling.found
    assert [x.gradients_at_once for x in found] == [True]


@NAMED
def test_dropout_drops_the_same(decomposed):
    model, x, labels = example()
    model.loss = dropped_mlp
    cut = tiled(model, 16, decomposed)
    found = values_of(cut.call, model, x, labels)
    assert cut.tiling.found
    whole = tiled(model, TOKENS, decomposed)
    check(deviations(found, values_of(whole.call, model, x, labels)))


class Clipped(torch.autograd.Function):
    """Its backward is no linear function."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1e-3, 1e-3)


def clipped(m, x, labels):
    return torch.nn.functional.cross_entropy(
        Clipped.apply(m.logits(x)).flatten(0, 1), labels.flatten()
    )


@NAMED
def test_a_backward_that_is_not_linear_waits_for_its_gradient(decomposed):
    found = both_ways(clipped, decomposed).tiling.found
    assert [x.gradients_at_once for x in found] == [False]


@NAMED
@pytest.mark.parametrize("form", [plain, returned, both], ids=name)
def test_without_gradients(form, decomposed):
    model, x, labels = example()
    model.loss = form
    compiled = tiled(model, 16, decomposed)
    with torch.no_grad():
        exact, got = (tree_leaves(f(x, labels)) for f in (model, compiled.call))
    names = [f"result {i}" for i in range(len(exact))]
    check(deviations(*(dict(zip(names, y, strict=True)) for y in (got, exact))))
    assert compiled.tiling.found


@NAMED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_tiles_are_as_exact_as_one_product(dtype, decomposed):
    model, x, labels = example(dtype)
    model.loss = upcast
    exact_model = copy.deepcopy(model).double()
    exact = values_of(exact_model, exact_model, x.double(), labels)
    rough = values_of(model, model, x, labels)
    compiled = tiled(model, 16, decomposed)
    got = values_of(compiled.call, model, x, labels)
    assert compiled.tiling.found
    assert {n: y.dtype for n, y in got.items()} == {
        n: y.dtype for n, y in rough.items()
    }
    check(deviations(got, exact, rough))


def test_a_second_run_is_bitwise_equal():
    model, x, labels = example(torch.float32)
    model.loss = both
    compiled = tiled(model, 24, True)
    one, other = (values_of(compiled.call, model, x, labels) for _ in range(2))
    for key, value in one.items():
        assert_equal(key, other[key], value)


def test_symbolic_lengths_are_left_and_stay_symbolic():
    model, x, labels = example()
    model.loss = plain
    compiled = tiled(model, 16, True)
    for length in (64, 80, 100):
        given = x[:, :length], labels[:, :length].contiguous()
        exact = values_of(model, model, *given)
        with torch._dynamo.config.patch(assume_static_by_default=False):
            check(deviations(values_of(compiled.call, model, *given), exact))
    assert len(compiled.after) == 1 and not compiled.tiling.found
