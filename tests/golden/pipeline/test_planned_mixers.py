"""A plan by the shape alone is what the compiler decides for a call of that shape."""

import pytest
import torch

from cpcompile.cost.hardware.profile import load_profile
from cpcompile.cost.mixer_planner import plan_mixers
from cpcompile.cost.mixer_shapes import MixerKind, MixerShape
from cpcompile.cost.plans import Direction
from tests.golden.capture import capture
from tests.support.stand_in_kernels import stand_ins

DELTA, SCAN = "gated_delta_rule", "mamba2"


def delta_rule(kernels):
    def call(q, k, v, g, beta):
        return kernels["chunk_gated_delta_rule"](q, k, v, g, beta)[0] * 2

    return call


def scan(kernels):
    def call(x, dt, b, c):
        a = -torch.ones(x.shape[2], dtype=x.dtype)
        kernel = kernels["mamba_chunk_scan_combined"]
        return kernel(x, dt, a, b, c, chunk_size=64) * 2

    return call


def operands(kind, batch, tokens, key_heads, heads, key_dim, dim):
    """By name; of one number, seen as often as it takes."""
    keys = (batch, tokens, key_heads, key_dim)
    values, gate = (batch, tokens, heads, dim), (batch, tokens, heads)
    shapes = (
        {"q": keys, "k": keys, "v": values, "g": gate, "beta": gate}
        if kind == DELTA
        else {"x": values, "dt": gate, "b": keys, "c": keys}
    )
    return {name: torch.zeros(1).bfloat16().expand(x) for name, x in shapes.items()}


def decided(mesh, kind, backward, sizes):
    """The MixerPlan of the pass."""
    tensors = operands(kind, *sizes)
    if backward:
        tensors = {name: x.requires_grad_() for name, x in tensors.items()}
    with stand_ins() as kernels, torch.set_grad_enabled(backward):
        captured = capture(
            (delta_rule if kind == DELTA else scan)(kernels),
            *tensors.values(),
            mesh=mesh,
            shard=dict.fromkeys(tensors, 1),
            strategy="auto",
            until="exchange_mixers",
        )
    assert captured.error is None, captured.error
    (plan,) = captured.ctx.findings.mixers
    return plan


def planned(mesh, kind, backward, sizes):
    return plan_mixers(
        MixerShape(MixerKind(kind), *sizes, bytes_per_element=2),
        load_profile("h100_sxm"),
        mesh.size(),
        Direction.BOTH if backward else Direction.FORWARD,
    )


CASES = [
    (2, DELTA, True, (1, 4096, 4, 4, 128, 128), "states"),
    (2, DELTA, False, (1, 4096, 4, 4, 128, 128), "states"),
    (8, DELTA, True, (1, 8192, 16, 32, 128, 128), "exchange"),
    # Two nodes: states have many bytes there, and an exchange few at first.
    (16, DELTA, True, (1, 16 * 512, 32, 32, 128, 128), "exchange"),
    (16, DELTA, True, (1, 16 * 8192, 32, 32, 128, 128), "states"),
    (16, DELTA, False, (1, 16 * 512, 32, 32, 128, 64), "exchange"),
    # Heads do not suffice: rows of a batch do, or channels; tokens are few.
    (16, DELTA, True, (16, 16 * 64, 8, 8, 128, 128), "exchange"),
    (16, DELTA, True, (1, 16 * 1024, 8, 8, 128, 128), "states"),
    (8, DELTA, True, (1, 8 * 1024, 4, 4, 128, 128), "states"),
    (8, SCAN, True, (1, 8 * 512, 1, 4, 128, 64), "states"),
    (32, DELTA, True, (1, 32 * 4, 24, 24, 128, 128), "gather"),
    (8, SCAN, True, (1, 8 * 64, 1, 80, 128, 64), "exchange"),
    (8, SCAN, True, (1, 8 * 8192, 1, 80, 128, 64), "exchange"),
    (16, SCAN, True, (1, 16 * 512, 16, 64, 128, 64), "exchange"),
    # Two numbers of heads, of which three ranks divide one, and two channels.
    (3, DELTA, True, (1, 3 * 64, 4, 12, 64, 2), "states"),
]


@pytest.mark.parametrize(
    ("mesh", "kind", "backward", "sizes", "strategy"), CASES, indirect=["mesh"]
)
def test_plan_and_pass_agree(mesh, kind, backward, sizes, strategy):
    ours = planned(mesh, kind, backward, sizes)
    theirs = decided(mesh, kind, backward, sizes)
    assert theirs.strategy.value == strategy
    assert ours.strategy is theirs.strategy
    assert ours.dim == theirs.dim
    assert {*dict(ours.seconds)} == {*dict(theirs.seconds)}
    for way, seconds in theirs.seconds:
        # A scan also reads what has no tokens, which is little.
        assert dict(ours.seconds)[way] == pytest.approx(seconds, rel=1e-3), way
