"""The report of cp.check, and what it leaves as it was."""

import dataclasses
import functools
import json
import logging
import re
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import register_sharding

import cpcompile as cp
from cpcompile import refusals
from cpcompile.apps.checking.check import check_call
from cpcompile.apps.checking.check_report import Check
from cpcompile.apps.checking.fake_step import CheckedCall
from cpcompile.apps.checking.longest_sequence import LongestSequence
from cpcompile.apps.cli.main import main
from cpcompile.compile import attempts
from cpcompile.errors import InputError, OptionError, RewriteError
from cpcompile.logs import warn_once
from cpcompile.torch_patches import graph_breaks
from cpcompile.torch_private.dynamo import counters

WORDS, WIDTH, LENGTH = 64, 32, 512


class Layer(nn.Module):
    """Causal attention, and what a test puts in front of it."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        if self.kind == "breaks":
            torch._dynamo.graph_break()
        if self.kind == "by hand":
            scores = (q @ k.transpose(-1, -2)).square()
            return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    def __init__(self, kind: str = "", layers: int = 1):
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        self.calls.add_(1)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        if self.kind == "gathers":
            kept = logits[:, labels[0, 1:].argsort()].flatten(0, 1)
            return F.cross_entropy(kept, labels[:, 1:].flatten())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens(length: int = LENGTH) -> Tensor:
    return torch.zeros(1, length, dtype=torch.long)


def check(kind: str = "", layers: int = 1, **settings) -> Check:
    settings = {"hardware": "cpu", **settings}
    return cp.check(Decoder(kind, layers), tokens(), tokens(), **settings)


@functools.cache
def shared_report() -> Check:
    """Of a model of which all is shared out."""
    call = CheckedCall(Decoder(), (tokens(), tokens()), {}, hardware="cpu", memory=1e9)
    return check_call(call, entry="train:make")


def printed(report: object) -> str:
    """Without numbers of lines, which every change of this file moves."""
    text = re.sub(r"test_check\.py:\d+(, in forward)?", "here", str(report))
    return re.sub(r"/\S*/(?=\w+\.py)", "", text)


def test_the_report():
    report = check("gathers", memory=1e9, layers=2)
    work, _, rest = printed(report).partition("  fits")
    assert_expected_inline(
        work + rest[rest.index("NEXT") :],
        """\
Decoder on 4 ranks, forward and backward (default options; predicted for cpu)

  attention    2 of 2 calls shared out: 2 hybrid
  inputs       tokens dim 1 (inferred)
  work         all ranks do 1.00 times that of one device (1.00 in the forward, 1.00 in
               the backward); 35.7 MFLOP per rank
  received     0.962 MiB per rank: attention 0.375, value 0.340, gradient 0.154, result
               0.094
  gathered     received  how             for       MiB  messages  line
               forward   all-gather      value   0.094         1  here
               forward   all-gather      value   0.094         1  here
               forward   all-gather      result  0.094         1  here
               backward  all-gather      value   0.094         1  here
               backward  reduce-scatter  value   0.047         1  here (head)
               forward   all-reduce      value   0.012         3  here (3 calls)
  graph        1 graph, no break
NEXT: 0.293 MiB gathered at here: 0.384 ms, 23% of the step;
      what reorders tokens by data, or loops over parts of them, gathers all of them:
      mask tokens instead (labels of -100, weights of zero), reorder hidden states and
      not logits, call on all tokens at once""",
    )


def test_a_report_of_what_is_shared_out():
    report = shared_report()
    assert report.findings == () and report.exit_code == 0
    assert report.work_ratio == pytest.approx(1.0)
    assert all(x.form is not None for x in report.attention)
    text = report.next
    assert "`cpcompile verify train:make --world 4` proves" in text
    assert "torchrun --standalone --nproc-per-node 4 train.py" in text
    text = shared_report().to_json()
    assert '"strategy": ' in text and '"saved_bytes"' in text
    assert json.loads(text)["ranks"] == 4
    # It follows from what is saved, which grows with the tokens.
    report = shared_report()
    assert report.longest is not None and report.saved_per_token is not None
    memory = report.longest.tokens / 4 * report.saved_per_token
    assert memory == pytest.approx(1e9, rel=0.01)
    assert "KiB that the forward saves at this length" in report.longest.basis
    assert str(LongestSequence(0, 1e9, "...")) == "no sequence in 1 GB per rank: ..."
    report = dataclasses.replace(shared_report(), warnings=("/" + "a" * 90, "b"))
    rows = str(report).splitlines()
    place = next(n for n, row in enumerate(rows) if "  warnings  " in row)
    assert rows[place].endswith("  /" + "a" * 90)
    assert rows[place + 1] == " " * len("  warnings     ") + "b"


def test_what_else_a_report_says():
    report = cp.check(Decoder(), tokens(), hardware="cpu")
    (finding,) = report.findings
    assert finding.what.startswith("results leave the model whole, 0.094 MiB")
    assert "(head)" in finding.what and "config.outputs" in finding.fix
    assert report.next == str(finding)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    report = cp.check(model, torch.ones(2, 16, 8), hardware="cpu")
    assert report.attention == () and "attention    none" in str(report)
    assert "inputs       none carries the sequence" in str(report)
    assert "nothing is shared out" in report.next
    report = check(options={"strategy": "latents"})
    assert report.refused is not None and report.exit_code == 1
    assert "RewriteError: attention at layers.0: strategy latents" in report.refused
    assert "set options={'strict': False}" in report.next
    report = check(train=False)
    assert report.work_ratio == pytest.approx(1.0)
    assert "forward and backward" not in str(report)
    assert "fits" not in str(report)


def test_breaks_and_attention_by_hand():
    report = check("breaks")
    (place,) = report.breaks
    assert "test_check.py" in place.place and "graph_break" in place.reason
    assert report.next.startswith("graph break at ")
    assert report.findings[0].seconds >= report.findings[-1].seconds
    assert any("graph break" in text for text in report.warnings)
    assert "it got zeros where it read values" in report.unknown[-1]
    assert "2 graphs, 1 break" in str(report)
    report = check("by hand", memory=1e9)
    assert {x.form for x in report.attention} == {"rows"}
    assert "by rows: layers.0: it is of no form" in " ".join(str(report).split())
    assert "0.375 MiB gathered at" in report.next and "(layers.0)" in report.next
    assert "; call F.scaled_dot_product_attention" in report.next
    assert report.longest is None
    assert "cannot be said: attention by hand may save weights" in str(report)


def test_a_mistake_of_cpcompile(monkeypatch):
    """A run raises it unless strict is False, which runs it on every rank."""
    monkeypatch.setattr(refusals, "raises_mistakes", False)
    names = {"__name__": "cpcompile.made_up"}
    exec("def fails(graph, ctx): raise KeyError('cat')", names)
    monkeypatch.setattr(attempts, "MODEL", (names["fails"],))
    report = check()
    assert report.refused == "a mistake in cpcompile, KeyError: 'cat'"
    assert report.work_ratio == pytest.approx(4.0)
    assert "runs unsharded, with all of its work on every rank" in report.warnings[0]


def test_what_torch_alone_compiles_is_a_mistake_of_ours(monkeypatch):
    """Whatever is raised, and by whom: torch alone is asked."""

    def fails(*args):
        raise NotImplementedError("out of torch")

    monkeypatch.setattr(attempts, "assemble", fails)
    text = refused(tokens(), tokens(), error=RewriteError)
    assert 'backend="cp" does not compile Decoder, and torch alone does' in text
    assert "NotImplementedError: out of torch" in text and "please report it" in text


@torch.library.custom_op("tests_of_check::squash", mutates_args=())
def squash(x: Tensor, scale: float) -> Tensor:
    return torch.tanh(x * scale)


@squash.register_fake
def _(x, scale):
    return torch.empty_like(x)


class Squashed(Decoder):
    def forward(self, tokens, labels=None):
        x = squash(self.embedding(tokens), 2.0)
        return sum(layer(x).sum() for layer in self.layers)


def test_a_custom_operator_that_stops_the_sequence():
    """The line that the warning gives lets it be inferred."""
    call = functools.partial(cp.check, Squashed(), tokens(), train=False)
    (warning,) = call().warnings
    line = warning[warning.index("register_sharding(") :]
    squash_of = "register_sharding(torch.ops.tests_of_check.squash.default)"
    assert line == f"{squash_of}(lambda x, scale: [([Shard(1)], [Shard(1), None])])"
    exec(line, {"torch": torch, "Shard": Shard, "register_sharding": register_sharding})
    assert call().warnings == ()


def test_a_model_without_memory_and_a_long_sequence():
    """Nothing is computed: 12 GiB of logits are none."""
    with torch.device("meta"):
        model = Decoder()
    long = torch.zeros(1, 2**20, dtype=torch.long, device="meta")
    report = cp.check(model, long, long, ranks=8, hardware="h100")
    assert report.hardware == "h100_sxm"
    assert report.work_ratio == pytest.approx(1.0)
    assert all(x.is_meta for x in model.parameters())


def test_what_was_there_stays(caplog):
    """The model, what was warned of, breaks, random numbers; no group is left."""
    model = Decoder("breaks")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    graph_breaks.forget()
    warn_once.cache_clear()
    state, hook = torch.get_rng_state(), sys.excepthook
    with caplog.at_level(logging.WARNING, "cpcompile"):
        report = cp.check(model, tokens(), tokens())
    assert report.warnings and not caplog.records
    assert graph_breaks.breaks() == ()
    assert all(x.equal(before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())
    assert torch.get_rng_state().equal(state) and sys.excepthook is hook
    assert not dist.is_initialized()
    again = cp.check(model, tokens(), tokens())
    assert again.warnings == report.warnings and again.breaks == report.breaks
    # Dynamo remembers no length, of which another one would be the second.
    counters.clear()
    compiled = torch.compile(Decoder(), backend="eager")
    compiled(tokens(16), tokens(16))
    assert counters["stats"]["unique_graphs"] == 1


def refused(*args, error=InputError, model=None, **settings) -> str:
    with pytest.raises(error) as caught:
        cp.check(model or Decoder(), *args, **settings)
    assert not dist.is_initialized()
    return str(caught.value)


MISTAKES = {
    **{repr(x): ((tokens(),), {"ranks": x}, f"got ranks={x!r}; needed at least 2")
       for x in (1, 0, True, 2.0)},
    "no module": ((tokens(),), {"model": len}, "got builtin_function_or_method as the"),
    "no input": ((), {}, "cp.check(model, tokens, labels)"),
    "memory": ((tokens(),), {"memory": -1}, "got memory=-1"),
    "memory of a tensor": ((tokens(),), {"memory": tokens()}, "got memory=Tensor"),
    "two axes": ((tokens(),), {"options": {"axis": ("ring", "ulysses")}}, "two axes"),
    "does not run": (
        (tokens().float(),), {},
        "Decoder does not run with these inputs under torch.compile ... "
        "Expected tensor for argument #1 'indices'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    args, settings, texts = MISTAKES[name]
    message = refused(*args, **settings)
    assert all(text in message for text in texts.split(" ... "))


def test_mistakes_of_names():
    text = refused(tokens(), options={"strateg": "ring"}, error=OptionError)
    assert "did you mean 'strategy'" in text
    text = refused(tokens(), hardware="h1000", error=ValueError)
    assert "hardware profile 'h1000' is unknown" in text


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (None, ["a process group of 1 ranks runs here", "before init_process_group"]),
        ("mesh", ["makes one of fake ranks"]),
    ],
)
def test_in_a_group_that_runs(one_rank, options, texts):
    if options == "mesh":
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        options = {"mesh": mesh}
    with pytest.raises(InputError) as caught:
        cp.check(Decoder(), tokens(), options=options)
    assert all(text in str(caught.value) for text in texts)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "checked.py").write_text(
        "import torch\n"
        "from tests.unit.checking.test_check import Decoder, tokens\n"
        "def made(): return Decoder(), {'tokens': tokens(), 'labels': tokens()}\n"
        "def wrong(): return Decoder()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "checked", raising=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["checked:wrong"], "checked:wrong returned Decoder; needed (model, inputs)"),
        (["checked:made", "--ranks", "1"], "got ranks=1; needed at least 2 ranks"),
        (["checked:made", "--memory", "much"], "no positive number of bytes"),
    ],
)
def test_mistakes_on_the_command_line(folder, capsys, arguments, text):
    assert main(["check", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_the_command(folder, capsys):
    line = "check checked:made --ranks 2 --strategy ring --hardware cpu --forward"
    assert main(line.split()) == 0
    out = capsys.readouterr().out
    assert out.startswith("Decoder on 2 ranks, forward (strategy='ring'; predicted")
    assert "1 of 1 calls shared out: 1 ring" in out
    assert "`cpcompile verify checked:made --world 2`" in out
