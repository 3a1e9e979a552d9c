"""What a plan says that ranks receive is what the operators of a step send."""

from collections import Counter

import pytest
import torch

import cpcompile as cp
from cpcompile.accounting.graph_account import Purpose
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.exchanges.test_known_mixers import DIM, HEADS, MODELS, WIDTH
from tests.support.stand_in_kernels import stand_ins

SHAPES = {
    "DeltaRule": {
        "kind": "gated_delta_rule",
        "key_heads": HEADS,
        "value_heads": 2 * HEADS,
        "key_dim": DIM,
        "value_dim": DIM,
    },
    "StateSpace": {
        "kind": "mamba2",
        "key_heads": 1,
        "value_heads": HEADS,
        "key_dim": 6,
        "value_dim": DIM,
    },
}


def received(name, strategy, tokens):
    """Bytes that rank 0 receives for a mixer in one step, or for values."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    with stand_ins() as kernels:
        options = {
            "mesh": sequence_mesh(2),
            "strategy": strategy,
            "inner": "aot_eager",
        }
        compiled = torch.compile(MODELS[name](kernels), backend="cp", options=options)
        report = cp.explain(compiled, torch.randn(1, tokens, WIDTH).requires_grad_())
    sums = Counter()
    for graph in report.graphs:
        for account in graph.accounts:
            for exchange in account.exchanges:
                sums[exchange.purpose] += exchange.bytes
    return sums[Purpose.MIXER], sums[Purpose.VALUE]


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("name", "strategy", "tokens"),
    [
        (name, strategy, tokens)
        for name in SHAPES
        for strategy in ("exchange", "states")
        for tokens in (16, 15)
    ],
)
def test_bytes_of_a_plan_are_those_of_a_step(pools, name, strategy, tokens):
    """Forward and backward; what all heads of Mamba2 read is gathered, as values."""
    plan = cp.plan_mixer(
        **SHAPES[name], seq=tokens, ranks=2, dtype="float32", strategy=strategy
    )
    of_mixer, of_values = pools[2].run(received, name, strategy, tokens)[0]
    assert of_mixer + of_values == plan.chosen.wire_bytes
