"""Autograd functions that write, and fused losses, equal one process."""

import pytest
import torch

from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import check, deviations, in_one_process
from tests.support.fused_losses import GATHERED, LOSSES, WRITES, Model, batch

# DTensor loses, or has no rule for, what these write.
GATHERED_WRITES = {"rows", "one row", "every other row", "index_put_", "result",
                   "backward rows"}  # fmt: skip
# One of each mechanism; tests/golden/sharding reads the graphs of others.
SOME_WRITES = ("columns", "rows", "backward rows")
SOME_LOSSES = ("scatter_add_", "index_put")


def gradients(model, compiled, tokens, labels):
    model.zero_grad()
    loss = compiled(tokens, labels)
    loss.backward()
    parameters = model.named_parameters()
    return {"loss": loss} | {k: p.grad for k, p in parameters if p.grad is not None}


def run(kinds, length, options):
    """Deviations, and whether anything was gathered, of every kind."""
    results = {}
    mesh = sequence_mesh(torch.distributed.get_world_size())
    for kind in kinds:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model(kind if kind in WRITES else LOSSES[kind]).double()
        data = batch(length)
        want = in_one_process(lambda x, d=data: gradients(x, x, *d), model)
        settings = {"inner": "aot_eager", "mesh": mesh, **options}
        compiled = torch.compile(model, backend="cp", options=settings)
        with warnings() as texts:
            got = gradients(model, compiled, *data)
        gathered = [x for x in texts if "on gathered tensors" in x]
        results[kind] = deviations(got, *want), gathered
    return results


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "length", "options"),
    [
        (2, 16, {}),
        (3, 24, {"layout": "zigzag"}),
        (2, 16, {"strict": False}),
        (3, 23, {}),
    ],
)
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(SOME_WRITES, id="some writes"),
        pytest.param(SOME_LOSSES, id="some losses"),
        pytest.param(WRITES, id="writes"),
        pytest.param(tuple(LOSSES), id="losses"),
    ],
)
def test_functions(pools, world, length, options, kinds):
    for results in pools[world].run(run, kinds, length, options, timeout=290):
        for kind, (deviation, gathered) in results.items():
            check(deviation)
            if length % world == 0 and kind in LOSSES:
                assert bool(gathered) == (kind in GATHERED), (kind, gathered)


@pytest.mark.timeout(300)
def test_functions_with_inductor(pools):
    kinds = ("rows", "index_put_", "backward rows", "scatter_add_", "cat")
    for results in pools[2].run(run, kinds, 16, {"inner": "inductor"}, timeout=290):
        for deviation, _ in results.values():
            check(deviation)
