"""What is computed in whole on every rank is said once, with its line and the fix."""

from __future__ import annotations

import linecache
import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from cpcompile.reporting import lost_parallelism
from cpcompile.reporting.explanation import Explanation
from cpcompile.reporting.graph_report import recording
from cpcompile.torch_patches import graph_breaks
from tests.golden.capture import forget, warnings

TOKENS, WIDTH = 32, 16


@pytest.fixture(autouse=True)
def fresh():
    forget()
    lost_parallelism.forget()
    graph_breaks.forget()


def run(fn, *args, mesh, **options):
    given = {"mesh": mesh, "inner": "aot_eager", **options}
    return torch.compile(fn, backend="cp", options=given)(*args)


def activations(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, TOKENS, WIDTH))


class ByHand(nn.Module):
    """Scores, softmax and values are calls of their own, with a factor per query.

    kind "rows": without, but its weights are read twice.
    """

    def __init__(self, kind: str = "matmul") -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)
        )
        if self.kind == "einsum":
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k).square()
            return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(-2, -1)) * 0.5
        if self.kind != "rows":
            scores = scores.square()
        scores = scores.masked_fill(~causal, -torch.inf)
        weights = F.dropout(F.softmax(scores, dim=-1), 0.0)
        return weights @ v + (weights.sum() if self.kind == "rows" else 0.0)


class Weights(nn.MultiheadAttention):
    """A module that returns weights."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, batch_first=True)

    def forward(self, x):
        return super().forward(x, x, x)[0]


UNSHARDED = (
    "nothing is sharded: attention is written by hand at ",
    "ranks together do 8.00 times the work of one device; name the input in "
    'options={"shard": {"argument": dim}}, or call F.scaled_dot_product_attention',
)
ROWS = "every rank gathers the keys, and holds the weights of its queries, 0.0 MiB each"
TOLD = {
    "matmul": (ByHand, {}, UNSHARDED),
    "einsum": (lambda: ByHand("einsum"), {}, UNSHARDED),
    "returns": (Weights, {}, ("need_weights=False",)),
    "named": (
        ByHand, {"shard": {"x": 1}},
        ("by rows of queries, because it is of no form that is known: every rank gath",
         "call F.scaled_dot_product"),
    ),
    # The input is inferred, and what it costs is said.
    "rows": (
        lambda: ByHand("rows"), {},
        ("is computed by rows of queries, because its weights are read more", ROWS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_attention_by_hand(mesh, caplog, name):
    make, options, parts = TOLD[name]
    run(make(), activations(), mesh=mesh, **options)
    (text,) = [x for x in warnings(caplog) if "attention" in x]
    assert all(part in text for part in parts), text
    assert ", line " in text and (name == "returns" or "test_lost_par" in text)


class Windows(nn.Module):
    """Attention of an image [B, 8, 8, C] in windows; kind "gates": a softmax alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        if self.kind == "gates":
            return x * F.softmax(self.qkv(x)[..., :WIDTH], -1)
        windows = x.view(-1, 2, 4, 2, 4, WIDTH).permute(0, 1, 3, 2, 4, 5)
        q, k, v = self.qkv(windows.reshape(-1, 16, WIDTH)).chunk(3, -1)
        scores = q @ k.mT
        near = (q @ self.qkv.weight[:16].T).cumsum(-1)
        return (scores + near).softmax(-1) @ v


@pytest.mark.parametrize("kind", ["windows", "gates"])
def test_windows_of_a_graph_with_nothing_sharded(mesh, caplog, kind):
    run(Windows(kind), activations(2, 8, 8, WIDTH), mesh=mesh)
    found = warnings(caplog)
    assert len(found) == (kind == "windows")
    for text in found:
        assert "over windows or other entries that are no sequence of an input" in text
        assert "test_lost_parallelism.py" in text and ", line " in text


class AlongRows(ByHand):
    """Attention among the entries of each row of an image [B, 8, 8, C]."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT).square().softmax(-1) @ v


def test_attention_of_own_rows_loses_nothing(mesh, caplog):
    with recording() as reports:
        run(AlongRows("rows"), activations(2, 8, 8, WIDTH), mesh=mesh, shard={"x": 1})
    assert not warnings(caplog)
    (report,) = reports
    (found,) = report.by_hand
    assert found.form == "batch"
    assert "own entries of the batch" in str(Explanation((report,)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def attend(self, x):
        q = self.inner(x).unflatten(-1, (4, -1)).transpose(1, 2)
        return self.of_heads(q).transpose(1, 2).flatten(2)

    def of_heads(self, q):
        return F.scaled_dot_product_attention(q, q, q)


class BreaksAround(Block):
    """vit-pytorch: a context manager that Dynamo cannot trace."""

    def of_heads(self, q):
        with torch.backends.cuda.sdp_kernel(enable_flash=False):
            return F.scaled_dot_product_attention(q, q, q)

    def forward(self, x):
        return x + self.outer(self.attend(x))


def line_of(text):
    """The line of the program that a warning names."""
    file, line = text.split(" at ")[1].split(" ")[0].rsplit(":", 1)
    return linecache.getline(file, int(line))


@pytest.mark.filterwarnings("ignore")
def test_attention_inside_of_a_break(mesh, caplog):
    run(BreaksAround(), activations(), mesh=mesh)
    text, *others = warnings(caplog)
    assert text.startswith("graph break in ")
    assert "sdp_kernel" in line_of(text)
    assert "attention that is called there runs in whole on every rank" in text
    assert "remove the break" in text
    # torch 2.15 has a graph for what comes after the break; it has no attention
    assert all("has no attention call" in other for other in others)


class BreaksInLoop(Block):
    """Layers one after another, and a function among them that is not compiled."""

    @torch.compiler.disable
    def of_heads(self, q):
        return F.scaled_dot_product_attention(q, q, q)

    def forward(self, x):
        for _ in range(2):
            x = x + self.outer(self.attend(x))
        return x


def test_a_function_that_breaks_in_a_loop(mesh, caplog):
    """The backend is never called for it."""
    run(BreaksInLoop(), activations(), mesh=mesh)
    texts = [x for x in warnings(caplog) if "runs in eager on every rank" in x]
    text = texts[0]
    assert "def forward" in line_of(text)
    assert "attention in functions that are not compiled runs in whole" in text
    assert "fullgraph=True" in text


class CountsInLoop(Block):
    def forward(self, x):
        for _ in range(2):
            x = x + self.outer(self.attend(x))
            x = x * torch.bincount((x[0, :, 0] > 0).long(), minlength=2).sum()
        return x


def test_what_breaks_in_a_loop_is_named(mesh, caplog):
    run(CountsInLoop(), activations(), mesh=mesh)
    (text,) = [x for x in warnings(caplog) if "runs in eager on every rank" in x]
    line = int(re.search(r"breaks \(line (\d+): (.*?)\) where", text)[1])
    assert "bincount" in linecache.getline(__file__, line)
    assert ": Dynamic shape operator: aten.bincount.default)" in text


def test_without_a_break_in_the_loop_nothing_is_said(mesh, caplog):
    """The twin."""

    class Loop(BreaksInLoop):
        of_heads = Block.of_heads

    run(Loop(), activations(), mesh=mesh)
    assert warnings(caplog) == []


class BreaksAfter(Block):
    """esm: of each block one graph has attention, and one has not."""

    def forward(self, x):
        x = x + self.attend(x)
        torch._dynamo.graph_break()
        return x + self.outer(x).relu()


def test_a_part_after_a_break(mesh, caplog):
    run(nn.Sequential(BreaksAfter(), BreaksAfter()), activations(), mesh=mesh)
    broken, idle = warnings(caplog)
    assert broken.startswith("graph break in forward at ")
    assert f"has no attention call, and its inputs of {TOKENS} tokens are pl" in idle
    assert "ranks together do 8.00 times the work of one device" in idle
    assert "test_lost_parallelism.py" in idle and ", line " in idle
    assert "remove the graph break" in idle and "cp.shard" in idle


class FrozenEmbedding(Block):
    """Nothing is trained; a hook has the results of the embedding need gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.requires_grad_(False)
        self.embedding.register_forward_hook(lambda m, i, out: out.requires_grad_(True))

    def forward(self, ids):
        return self.outer(self.body(ids)).relu()

    def body(self, ids):
        return self.attend(self.embedding(ids))


def test_a_hook_that_breaks_the_graph(mesh, caplog):
    """No graph in front of the break tells the backend of it."""
    run(FrozenEmbedding(), torch.randint(9, (2, TOKENS)), mesh=mesh)
    texts = warnings(caplog)
    (broken,) = [x for x in texts if x.startswith("graph break at ")]
    assert "register_forward_hook" in line_of(broken)
    assert "requires_grad_() intermediate leaked as output" in broken
    assert "call requires_grad_ outside of what is compiled" in broken
    assert '"use_reentrant": False' in broken
    (idle,) = [x for x in texts if "has no attention call" in x]
    assert f"its inputs of {TOKENS} tokens are plain" in idle


class BreaksBefore(Block):
    """As Gemma 3 with images: data are compared before any layer."""

    def __init__(self, compare) -> None:
        super().__init__()
        self.compare = compare

    def forward(self, x):
        if self.compare(x):
            x = x + 1
        return self.outer(self.attend(x)).relu()


WAYS_OUT = {
    "item": (lambda x: x.sum().item() > 9, "capture_scalar_outputs = True"),
    "sizes": (
        lambda x: x[x > 0].numel() > 9,
        "capture_dynamic_output_shape_ops = True",
    ),
    "equal": (lambda x: torch.equal(x, x + 1), "decide outside of what is compiled"),
}


@pytest.mark.parametrize("name", WAYS_OUT)
def test_the_way_out_of_a_break(mesh, caplog, name):
    """Naming the input changes nothing after it, nor are other programs' breaks it."""
    compare, way_out = WAYS_OUT[name]
    run(lambda x: x if x.sum().item() > 9 else x / 2, activations(), mesh=mesh)
    run(BreaksBefore(compare), activations().requires_grad_(), mesh=mesh)
    texts = [x for x in warnings(caplog) if "graph break" in x]
    assert texts and all(way_out in x for x in texts), texts
    assert all("test_lost_parallelism.py" in x for x in texts)


def head(x, weight):
    """Of one vector per sequence."""
    return F.linear(x, weight).relu()


def loss(x, target):
    return F.cross_entropy(x.flatten(0, 1), target)


def optimizer_step(weight, gradient):
    with torch.no_grad():
        return weight.sub_(0.1 * gradient @ gradient.mT @ gradient)


def router(x, weight, experts):
    """A softmax between two products, of which neither is of activations alone."""
    return F.linear(F.linear(x, weight).softmax(-1), experts)


PARAMETERS = {
    name: nn.Parameter(torch.randn(WIDTH, WIDTH)) for name in ("weight", "experts")
}
QUIET = {
    "head": (head, (activations(2, WIDTH), PARAMETERS["weight"])),
    "loss": (loss, (activations(), torch.arange(2 * TOKENS) % WIDTH)),
    "optimizer": (optimizer_step, (PARAMETERS["weight"], torch.randn(WIDTH, WIDTH))),
    "router": (router, (activations(2, 9, WIDTH), *PARAMETERS.values())),
    "tiny": (lambda x: x + 1, (activations(),)),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_has_nothing_to_share_out_is_quiet(mesh, caplog, name):
    run(Block().attend, activations(), mesh=mesh)
    forget()
    caplog.clear()
    fn, args = QUIET[name]
    run(fn, *args, mesh=mesh)
    assert warnings(caplog) == []


def test_parts_without_attention_anywhere_are_quiet(mesh, caplog):
    layer = nn.Linear(WIDTH, WIDTH)
    run(layer, activations(), mesh=mesh)
    assert warnings(caplog) == []
