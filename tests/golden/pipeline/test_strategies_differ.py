"""The calls of one model get the strategy that suits each."""

import torch
import torch.nn.functional as F

from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden

sdpa = F.scaled_dot_product_attention


def layers(x, words):
    """A decoder, an encoder, one with a single key head, and attention to a text."""
    causal = sdpa(x, x, x, is_causal=True)
    full = sdpa(causal, x, x)
    grouped = sdpa(full, x[:, :1], x[:, :1], enable_gqa=True)
    return sdpa(grouped, words, words)


def test_every_layer_has_its_own(mesh):
    x, words = (
        torch.empty((1, 32, n, 128), dtype=torch.bfloat16) for n in (131072, 512)
    )
    captured = capture(
        layers, x, words, strategy="auto", mesh=mesh, shard={"x": 2, "words": 2}
    )
    rows = []
    for call, plan in captured.ctx.findings.plans.items():
        best, other = plan.chosen, plan.runner_up
        rows.append(
            f"{call.q_shape[1]}:{call.k_shape[1]} heads, {call.k_shape[2]} keys: "
            f"{best.label} {1e3 * best.seconds:.2f} ms, "
            f"then {other.label} {1e3 * other.seconds:.2f} ms"
        )
    assert_golden(
        "\n".join(rows),
        """\
32:32 heads, 131072 keys: ulysses 53.27 ms, then hybrid 2 (ring) in 4 57.70 ms
32:32 heads, 131072 keys: ring 98.31 ms, then ulysses 96.05 ms
32:1 heads, 131072 keys: all_gather 94.15 ms, then ring 95.67 ms
32:32 heads, 512 keys: latents 0.48 ms, then all_gather 0.51 ms""",
    )
