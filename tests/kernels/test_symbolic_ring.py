"""The CUDA code of a ring for many lengths: written once, executed for several."""

import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from cpcompile.compile.overlap import check_overlap
from cpcompile.torch_patches import symbolic_tracing
from tests.kernels.generated_code import generated_code
from tests.kernels.test_generated_ring import run_rank
from tests.support.bounds import check, deviations

HEADS, DIM = 2, 32


def attend(x, causal):
    """Two key heads and values of four heads; the queries are all of it."""
    k, v = x[:, :HEADS], x[:, HEADS:]
    return F.scaled_dot_product_attention(x, k, v, is_causal=causal, enable_gqa=True)


def make_input(device, seq, marked=True):
    torch.manual_seed(0)
    x = torch.randn(1, 2 * HEADS, seq, DIM, device=device, requires_grad=True)
    if marked:
        torch._dynamo.mark_dynamic(x, 2)
    return (x,)


def code_of_rank(rank, ranks, causal, guards, **asked):
    """What torch.compile(backend="cp") writes; `guards` gets those on the length."""

    def compiler(fn):
        mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("cp",))
        options = {"mesh": mesh, "shard": {"x": 2}, **asked}
        return torch.compile(fn, backend="cp", options=options, fullgraph=True)

    def remember(length):
        guards.append(original(length))
        return guards[-1]

    original = symbolic_tracing.guards_on
    with mock.patch.object(symbolic_tracing, "guards_on", remember):
        return generated_code(
            lambda x: attend(x, causal),
            functools.partial(make_input, seq=64 * ranks),
            compiler=compiler,
            rank=rank,
            ranks=ranks,
        )


def codes_of_ranks(ranks, ring, causal, **asked):
    """The code of every rank, with the messages of a ring of `ring` ranks."""
    guards: list[str] = []
    codes = [code_of_rank(r, ranks, causal, guards, **asked) for r in range(ranks)]
    assert len(set(guards)) == 1, guards  # else a rank would compile alone
    for code in codes:
        assert any(isinstance(x, tuple) for x in code.arguments)
        assert len(check_overlap(code.forward)) == ring - 1
    return codes


@pytest.mark.parametrize(
    ("ranks", "causal", "layout"),
    [(2, True, "contiguous"), (3, False, "contiguous"), (3, True, "zigzag")],
)
def test_one_code_for_many_lengths(interpreters, ranks, causal, layout):
    codes = codes_of_ranks(ranks, ranks, causal, layout=layout, strategy="ring")
    for chunk in (64, 40, 75):
        (x,) = make_input("cpu", chunk * ranks, marked=False)
        gradient = torch.randn(x.shape)
        exact, rough = (
            whole_attention(x.detach().to(dtype), gradient, causal)
            for dtype in (torch.float64, torch.float32)
        )
        inputs = [x.detach()]
        for got in interpreters[ranks].run(
            run_rank, codes, inputs, gradient, timeout=120
        ):
            check(deviations(dict(zip(exact, got, strict=True)), exact, rough))


def test_the_ring_of_a_hybrid():
    """Written only: the interpreted ranks have no groups for exchanges."""
    codes_of_ranks(4, 2, True, layout="zigzag", strategy="hybrid")


def whole_attention(x, gradient, causal):
    x.requires_grad_()
    out = attend(x, causal)
    (grad,) = torch.autograd.grad(out, x, gradient.to(x.dtype))
    return {"out": out, "grad of x": grad}
