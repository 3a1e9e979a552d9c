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
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.model_cases import check_model, run_model
from tests.support.bounds import check, deviations, gradients

LAYOUTS = ["zigzag", "striped", "fold"]
IN_ONE_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)
PLAIN = ("small_gpt", 64, 2, "plain", 0)
SHARDED = ("small_gpt", 50, 4, "dtensor", 2)
CHECKPOINTED = ("checkpoint_one", 64, 2, "plain", 0)
CACHED = ("llama", 37, 3, "dtensor", 6)
IN_ALL_LAYOUTS = [
    PLAIN,
    ("small_gpt", 37, 3, "plain", 0),
    ("llama", 64, 4, "plain", 0),
    CACHED,
]


def check_run(case, layout, inner, strategy, pools):
    name, seq, world, door, left = case
    options = {"inner": inner, "layout": layout, "strategy": strategy}
    args = (run_model, name, seq, world, door, options)
    for rank, run in enumerate(pools[world].run(*args, timeout=240)):
        check_model(name, seq, run["values"], rank)
        assert run["layouts"] == [layout] * 2
        assert run["relayouts"] == [(left, 8 - left)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", IN_ALL_LAYOUTS, ids=str)
def test_training_step(pools, case, layout):
    check_run(case, layout, "aot_eager", "ring", pools)


@pytest.mark.parametrize("case", [SHARDED, ("checkpoint_one", 41, 2, "plain", 0)])
def test_more_training_steps_in_zigzag(pools, case):
    check_run(case, "zigzag", "aot_eager", "ring", pools)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("case", "layout", "strategy"),
    [
        (PLAIN, "zigzag", "ring"),
        (SHARDED, "fold", "ring"),
        (CHECKPOINTED, "zigzag", "ring"),
    ],
    ids=str,
)
def test_training_step_with_inductor(pools, case, layout, strategy):
    check_run(case, layout, "inductor", strategy, pools)


@pytest.mark.parametrize("strategy", ["all_gather", "hybrid"])
def test_other_strategies(pools, strategy):
    check_run(("small_gpt", 50, 4, "plain", 0), "zigzag", "aot_eager", strategy, pools)


@pytest.mark.timeout(300)
@IN_ONE_LAYOUT
def test_a_graph_break_in_the_middle(pools, layout):
    """GPT-2 of transformers breaks in front of its loss: values cross it in order."""
    options = {"inner": "aot_eager", "layout": layout, "strategy": "ring"}
    for rank, run in enumerate(
        pools[2].run(run_model, "gpt2", 37, 2, "plain", options, timeout=240)
    ):
        check_model("gpt2", 37, run["values"], rank)
        assert run["layouts"] == [layout] * 2


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

    def forward(self, x, words):
        x = x + self.positions[: x.shape[1]]
        for kind in self.kinds:
            if kind == "a":
                x = self.attend(x, x, True)
            elif kind == "w":
                x = self.attend(x, words, False)
            elif kind == "c":
                x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
            else:
                x = x - x.cumsum(1).tanh()
        return x.square().mean(), x


def run_mixed(kinds, seq, world, layout, dropout, axes):
    """Deviations of loss, output and gradients of a training step, and relayouts."""
    torch._dynamo.reset()
    mesh = sequence_mesh(world)
    if axes == 2:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    model = Mixed(kinds, dropout).double()
    x, words = torch.randn(2, seq, 16).double(), torch.randn(2, 11, 16).double()

    def results(step, x, words):
        torch.manual_seed(1)
        model.zero_grad()
        loss, out = step(x, words)
        grads = gradients(loss, model)
        return {"loss": loss.detach(), "out": out.detach()} | grads

    exact = results(model, x, words)
    options = {"inner": "aot_eager", "layout": layout, "strategy": "ring"}
    if axes == 1:
        options |= {"mesh": mesh, "shard": {"x": 1, "words": 1}}
    else:
        x, words = cp.shard(x, mesh, 1), cp.shard(words, mesh, 1)
    step = torch.compile(model, backend="cp", options=options)
    with recording() as reports:
        found = results(step, x, words)
    (report,) = reports
    return deviations(found, exact), report.relayouts_left


@pytest.mark.timeout(200)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kinds", "seq", "world", "dropout", "left"),
    [
        ("aa", 37, 2, 0.3, 0),
        ("awa", 37, 3, 0.0, 0),
        ("aca", 32, 2, 0.0, 2),
        ("asa", 33, 2, 0.0, 1),
    ],
)
def test_around_a_call_that_mixes_tokens(
    pools, layout, kinds, seq, world, dropout, left
):
    args = (run_mixed, kinds, seq, world, layout, dropout, 1)
    for found, relayouts in pools[world].run(*args, timeout=120):
        check(found)
        assert relayouts == left


@IN_ONE_LAYOUT
def test_two_mesh_axes(pools, layout):
    args = (run_mixed, "aa", 37, 4, layout, 0.0, 2)
    for found, relayouts in pools[4].run(*args, timeout=120):
        check(found)
        assert relayouts == 2, "x comes in and goes out as a DTensor in order"
