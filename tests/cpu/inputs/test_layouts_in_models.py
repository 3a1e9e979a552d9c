"""Models in balanced layouts: the same loss, logits and gradients, and no relayouts.

Plain inputs: nothing is left, because ids, labels and tables are cut in the layout, and
results are gathered in order. DTensor inputs and results are in order outside of the
graph: ids come in by one relayout and hidden states go out by one, in front of the
logits; Llama returns its cache, keys and values of both layers, as well.
"""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import cpcompile as cp
from cpcompile.reporting.graph_report import recording
from tests.cpu.against_one_process import run
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.model_cases import check_model, run_model
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import check, deviations

LAYOUTS = ("zigzag", "striped", "fold")
RING = {"strategy": "ring"}
# Model, tokens, ranks, how they are given, layout, options, relayouts that are left.
CASES = [
    *(
        (*case, layout, RING, left)
        for *case, left in (
            ("small_gpt", 64, 2, "plain", 0),
            ("small_gpt", 37, 3, "plain", 0),
            ("llama", 64, 4, "plain", 0),
            ("llama", 37, 3, "dtensor", 6),
        )
        for layout in LAYOUTS
    ),
    ("small_gpt", 50, 4, "dtensor", "zigzag", RING, 2),
    ("checkpoint_one", 41, 2, "plain", "zigzag", RING, 0),
    *(
        (*case, RING | {"inner": "inductor"}, left)
        for *case, left in (
            ("small_gpt", 64, 2, "plain", "zigzag", 0),
            ("small_gpt", 50, 4, "dtensor", "fold", 2),
            ("checkpoint_one", 64, 2, "plain", "zigzag", 0),
        )
    ),
    *(
        ("small_gpt", 50, 4, "plain", "zigzag", {"strategy": strategy}, 0)
        for strategy in ("all_gather", "hybrid")
    ),
    # GPT-2 breaks in front of its loss: values cross it in order.
    *(("gpt2", 37, 2, "plain", layout, RING, None) for layout in LAYOUTS),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "seq", "world", "door", "layout", "options", "left"), CASES, ids=str
)
@on_ranks("world", timeout=240)
def test_training_step(name, seq, world, door, layout, options, left):
    options = {"inner": "aot_eager", "layout": layout} | options
    run = run_model(name, seq, world, door, options)
    check_model(name, seq, run["values"], torch.distributed.get_rank())
    assert run["layouts"] == [layout] * 2
    if left is not None:  # ids are gathered
        left -= door == "dtensor"
        assert run["relayouts"] == [(left, 8 - left)]


class Mixed(nn.Module):
    """A decoder with what mixes tokens: a convolution, and attention to a text."""

    def __init__(self, kinds: str, dropout: float) -> None:
        super().__init__()
        self.kinds, self.dropout = kinds, dropout
        self.positions = nn.Parameter(torch.randn(40, 16) / 4)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.out = nn.Linear(16, 16)

    def attend(self, x, words, is_causal):
        q, k = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in (x, words))
        y = F.scaled_dot_product_attention(q, k, k, is_causal=is_causal)
        y = self.out(y.transpose(1, 2).flatten(2))
        return x + F.dropout(y, self.dropout, self.training)

    def forward(self, x, words, ids):
        x = x + self.positions[ids.cumsum(1)]  # positions that count what is no padding
        for kind in self.kinds:
            if kind in "aw":
                x = self.attend(x, x if kind == "a" else words, kind == "a")
            elif kind == "c":
                x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
            else:
                x = x - x.cumsum(1).tanh()
        return x.square().mean(), x


# Of kinds "a" is attention, "w" that to a text, "c" a convolution, "s" a sum over
# tokens. On two mesh axes x comes in and goes out as a DTensor in order.
MIXED = [
    (*case, layout)
    for case in (
        ("aa", 37, 2, 0.3, 0),
        ("awa", 37, 3, 0.0, 0),
        ("aca", 32, 2, 0.0, 2),
        ("asa", 33, 2, 0.0, 1),
        ("aa", 37, 4, 0.0, 2),
    )
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("kinds", "seq", "world", "dropout", "left", "layout"), MIXED)
@on_ranks("world")
def test_around_a_call_that_mixes_tokens(kinds, seq, world, dropout, left, layout):
    model = Mixed(kinds, dropout).double()
    inputs = [torch.randn(2, n, 16, dtype=torch.float64) for n in (seq, 11)]
    inputs.append(torch.randint(2, (2, seq)))
    exact = run(model, inputs, model)
    options = {"inner": "aot_eager", "layout": layout, "strategy": "ring"}
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        inputs = [cp.shard(x, mesh, 1) for x in inputs]
    else:
        shard = dict.fromkeys(("x", "words", "ids"), 1)
        options |= {"mesh": sequence_mesh(world), "shard": shard}
    step = torch.compile(model, backend="cp", options=options)
    with recording() as reports:
        check(deviations(run(step, inputs, model), exact))
    assert [report.relayouts_left for report in reports] == [left]
