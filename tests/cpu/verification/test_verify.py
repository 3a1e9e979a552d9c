"""cp.verify on ranks: what is right is found right, and bad input is refused.

In a group that runs, as under torchrun, and by the command, on processes of its own.
"""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile.apps.verification.ranks import Ranks
from cpcompile.apps.verification.steps import ComparedProgram
from cpcompile.apps.verification.verify import Verification
from cpcompile.errors import InputError
from tests.cpu.on_ranks import on_ranks
from tests.cpu.verification.models import make_inputs, make_model

OPTIONS = {"inner": "aot_eager"}


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make_model()


class Checkpointed(Around):
    """The model in a checkpoint region."""

    def forward(self, tokens, labels):
        inner = self.inner
        x = inner.embedding(tokens)
        x = x + checkpoint(self.block, x, use_reentrant=False)
        return F.cross_entropy(inner.head(x).flatten(0, 1), labels.flatten())

    def block(self, x):
        return self.inner.attention(self.inner.norm(x), None)


class Broken(Around):
    """A graph break, writes in place, and a conversion to float32."""

    def forward(self, tokens, labels):
        inner = self.inner
        x = inner.embedding(tokens).mul_(2)
        first = x[:, :4]
        first += 1
        torch._dynamo.graph_break()
        x = x + inner.attention(inner.norm(x).float().to(x.dtype), None)
        logits = inner.head(x)
        logits.mul_(2)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Drops(Around):
    """Dropout, which draws for the whole sequence."""

    def forward(self, tokens, labels):
        inner = self.inner
        x = F.dropout(inner.embedding(tokens), 0.25)
        x = x + inner.attention(inner.norm(x), None)
        return {"logits": inner.head(x), "hidden": x}


class Routed(Around):
    """Experts by torch's product of grouped rows, with weights of float32."""

    def __init__(self):
        super().__init__()
        width = self.inner.embedding.weight.shape[1]
        self.router = nn.Linear(width, 4)
        self.experts = nn.Parameter(torch.randn(4, width, width) / width)

    def forward(self, tokens, labels):
        inner = self.inner
        x = inner.embedding(tokens)
        x = x + inner.attention(inner.norm(x), None)
        rows = x.flatten(0, 1)
        weight, expert = self.router(rows).softmax(-1, dtype=torch.float32).max(-1)
        order = expert.argsort(stable=True)
        ends = torch.histc(expert.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        routed = F.grouped_mm(rows[order], self.experts, offs=ends)
        routed = routed * weight[order].unsqueeze(-1)
        total = torch.zeros_like(rows, dtype=torch.float32).index_add(0, order, routed)
        x = x + total.view_as(x).to(x.dtype)
        return F.cross_entropy(inner.head(x).flatten(0, 1), labels.flatten())


FORMS = {
    "plain": make_model,
    "sum over tokens": functools.partial(make_model, mixes=True),
    "checkpointed": Checkpointed,
    "graph break": Broken,
    "dropout": Drops,
}


class Dropping(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_no_module_differs_where_nothing_is_wrong(form, layout, dtype):
    nothing_is_wrong(FORMS[form], layout, dtype)


@on_ranks(2)
def test_a_model_that_does_not_run_in_float64():
    """torch has no products of grouped rows there; float32 is what it is held to."""
    unknown = "by modules, in float32, the model does not run: Routed does not run on"
    nothing_is_wrong(Routed, "zigzag", torch.bfloat16, unknown)


def nothing_is_wrong(make, layout, dtype, *unknown):
    program = ComparedProgram(make().to(dtype), (), make_inputs(23), 2)
    options = OPTIONS | {"layout": layout, "strategy": "ring"}
    found = Verification(Ranks(None, {}), program, options, lambda what: None)
    with cp.config.patch(hardware="cpu"):
        ran, checks = found.compared(program, options)
        first, notes = found.first()
    assert ran.calls and all(x.ok for x in checks) and first is None, (checks, first)
    said = ["float32", "bfloat16"] if dtype is torch.bfloat16 else ["float32"]
    said = [f"by modules, in {x}, nothing differs in the first step" for x in said]
    said[: len(unknown)] = unknown
    for note, start in zip(notes, said, strict=True):
        assert note.startswith(start), notes


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("another size", "world=4, and the process group that runs has 2 ranks"),
        ("no attention", "Sequential has no attention call in its graphs"),
        ("DTensors", "needed plain full tensors"),
        ("dropped weights", "drops weights at random"),
    ],
)
@on_ranks(2)
def test_what_is_refused(case, said):
    inputs = make_inputs()
    model, options, world = make_model(), OPTIONS, None
    if case == "another size":
        world = 4
    elif case == "no attention":
        model, inputs = nn.Sequential(nn.Linear(8, 8)), {"input": torch.ones(2, 12, 8)}
        options = OPTIONS | {"shard": {"input": 1}}
    elif case == "DTensors":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        inputs["tokens"] = cp.shard(inputs["tokens"], mesh, 1)
    elif case == "dropped weights":
        model = Dropping()
        inputs = {"x": torch.randn(1, 2, 12, 8, requires_grad=True)}
        options = OPTIONS | {"shard": {"x": 2}}
    with pytest.raises(InputError) as caught:
        cp.verify(model, options=options, world=world, **inputs)
    text = str(caught.value)
    assert said in text and ("model.eval()" in text or case != "dropped weights")


def raised_on_rank_1(program, mesh):
    if dist.get_rank():
        raise InputError("only here")
    dist.barrier()


def ended_on_rank_1(program, mesh):
    if dist.get_rank():
        os._exit(7)
    dist.barrier()


@pytest.mark.parametrize(
    ("fn", "error", "said"),
    [
        (raised_on_rank_1, InputError, "^only here$"),
        (ended_on_rank_1, RuntimeError, "process 1 .* exit code 7"),
    ],
)
def test_a_rank_that_fails_ends_the_others(fn, error, said):
    program = ComparedProgram(nn.Linear(2, 2), (torch.ones(2),), {}, 1)
    with pytest.raises(error, match=said):
        Ranks(2, {}).run(fn, program)


def test_the_command_on_processes_of_its_own(tmp_path):
    path = tmp_path / "report.json"
    command = [sys.executable, "-m", "cpcompile", "verify"]
    command += ["tests.cpu.verification.models:make_model_and_inputs", "--world", "2"]
    command += ["--inner", "aot_eager", "--steps", "1", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "Model on 2 ranks equals one process (inner='aot_eager')" in done.stdout
    assert "compile and run on 2 ranks" in done.stderr
    found = json.loads(path.read_text())
    assert found["ok"] and found["first"] is None and found["world"] == 2
    kinds = {check["kind"] for check in found["checks"]}
    assert kinds == {"result", "loss", "gradient", "weight"}
