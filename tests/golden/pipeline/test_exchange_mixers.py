"""What mixes tokens is computed in parts along heads, channels or rows of a batch."""

import re

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.against_one_process import warnings
from tests.golden.capture import capture
from tests.golden.golden_text import assert_golden, bare_calls, lines_with, table
from tests.support.mixers import (
    AfterStem,
    GatedScan,
    Lightning,
    LinearAttention,
    LongConvolution,
    LongKernel,
    Mixer,
    NormOverHeads,
    Retention,
    ShortConvolutions,
    WrittenChunks,
)
from tests.support.stand_in_kernels import stand_ins

MESH_AXES = {"cp": 2}


def exchanged(module, mesh, batch=1, tokens=4096):
    """The step of the pass; a rank has a large part, so that messages pay."""
    x = torch.zeros(1, 1, 1).expand(batch, tokens, module.norm.normalized_shape[0])
    return capture(module, x, mesh=mesh, shard={"x": 1}, until="exchange_mixers")[
        "exchange_mixers"
    ]


def exchanges(step):
    """Every value that is exchanged, with its dimension before and after."""
    marks = re.findall(
        r"constraint\((.*?), 'exchanged', (.*)\)", bare_calls(step.after)
    )
    return [f"{value} {dims.replace(', ', '>')}" for value, dims in marks]


class Chunks(WrittenChunks):
    """A tensor that is written to is split as what is written."""

    chunk = 1024


class OneProjection(Lightning):
    """Its weight has heads, too, but cutting it shares out nothing.

    Chunks of tokens of single heads are no sequences of the length of a chunk.
    """

    chunk = 1024


class ProductsOfChunks(Retention):
    """Chunks of q and k each lie on some ranks, and one of them has to be gathered."""

    chunk = 256


def test_what_is_exchanged(mesh):
    """All between the projections is on heads or on channels.

    Then a rank needs no tokens of its neighbours; rows need one exchange each way.
    """
    steps = {
        "heads": exchanged(LinearAttention(512), mesh),
        "rows": exchanged(LinearAttention(512), mesh, batch=2),
        "rows of a norm over heads": exchanged(NormOverHeads(512), mesh, batch=2),
        "channels by fft": exchanged(LongConvolution(512), mesh),
        "channels of short kernels": exchanged(ShortConvolutions(512), mesh),
        "after a stem": exchanged(AfterStem(512), mesh, tokens=16384),
        "a loop over tokens": exchanged(GatedScan(4096), mesh, tokens=16),
        "written chunks": exchanged(Chunks(512), mesh),
        "one projection": exchanged(OneProjection(512), mesh),
        "products of chunks": exchanged(ProductsOfChunks(512), mesh, tokens=1024),
    }
    assert_golden(
        table({name: ", ".join(exchanges(step)) for name, step in steps.items()}),
        """\
heads: q_2 1>2, k_2 1>2, unsqueeze_1 1>2, truediv 2>1
rows: l_x_ 1>0, truediv 0>1
rows of a norm over heads: l_x_ 1>0, mul_1 0>1
channels by fft: x 2>1, mixed 1>2
channels of short kernels: transpose 2>1, transpose_2 2>1, transpose_4 2>1, truediv 2>1
after a stem: q_2 1>2, k_2 1>2, unsqueeze_1 1>2, truediv 2>1
a loop over tokens: chunk[1] 1>2, gate 1>2, stack 2>1
written chunks: transpose 2>1, transpose_1 2>1, transpose_2 2>1, flatten 1>2
one projection: transpose 2>1, cat 1>2
products of chunks: q_1 2>1, k_1 2>1, v_1 2>1, cat 1>2""",
    )
    counts = [steps[x].rewrites for x in ("heads", "rows", "one projection")]
    assert counts == [2, 2, 12], "of the last one q, k and v in four chunks"


class TokenWise(Mixer):
    """Calls on single tokens, and sums that may wait: what ranks can share."""

    def mix(self, q, k, v):
        return q * k.sigmoid() + v * (q * k).sum(1, keepdim=True)


TAPS = 1 << 16


class AllTokens(LongKernel):
    """A convolution that reads all tokens; its weight takes no memory."""

    taps = TAPS

    def __init__(self, width, of_channels=1):
        Mixer.__init__(self, width)
        weight = torch.zeros(1, 1, 1).expand(2 * width, of_channels, self.taps)
        self.filter = torch.nn.Parameter(weight)


class OfAllChannels(AllTokens):
    def __init__(self, width):
        super().__init__(width, width)

    def mix(self, q, k, v):
        padded = F.pad(v.transpose(1, 2), (self.taps - 1, 0))
        mixed = F.conv1d(padded, self.filter).transpose(1, 2)
        return q * mixed[..., : q.shape[-1]] * k


@pytest.mark.parametrize("mesh", [4], indirect=True)
def test_a_convolution_that_reads_all_tokens(mesh):
    step = exchanged(AllTokens(512), mesh, tokens=TAPS)
    assert exchanges(step) == ["transpose 2>1", "conv1d 1>2"]


STAYS = {
    "norm over heads": (2, NormOverHeads, 4096),  # tokens meet in it
    "what ranks can share": (2, TokenWise, 4096),
    "few tokens of others": (4, LongKernel, TAPS),  # are borrowed
    "all channels": (4, OfAllChannels, TAPS),
    "four heads": (8, WrittenChunks, 32),
}


@pytest.mark.parametrize(
    ("mesh", "make", "tokens"), STAYS.values(), ids=STAYS, indirect=["mesh"]
)
def test_what_stays(mesh, make, tokens):
    step = exchanged(make(512), mesh, tokens=tokens)
    assert step.rewrites == 0
    assert make is WrittenChunks or not step.changed


class NextTokens(torch.nn.Module):
    """Attention, and a loss whose labels are shifted in the model."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x, labels):
        q, k, v = (y.unsqueeze(1) for y in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(y.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(("layout", "count"), [("contiguous", 1), ("zigzag", 0)])
def test_an_exchange_that_saves_moves(mesh, layout, count):
    """Rows of labels, in place of a pad and a slice, which work in zigzag as well."""
    x, labels = torch.zeros(2, 64, 16), torch.zeros(2, 64, dtype=torch.int64)
    steps = capture(
        NextTokens(), x, labels, mesh=mesh, shard={"x": 1, "labels": 1},
        layout=layout, strategy="ring", until="exchange_mixers",
    )  # fmt: skip
    step = steps["exchange_mixers"]
    assert step.rewrites == count
    assert [x.split()[1] for x in exchanges(step)] == ["1>0", "0>1"] * count


class Kept(torch.nn.Module):
    """A gated delta rule that Dynamo cannot trace, and perhaps a norm over heads."""

    def __init__(self, kernels, norm=False):
        super().__init__()
        self.rule, self.with_norm = kernels["chunk_gated_delta_rule"], norm
        self.norm = torch.nn.LayerNorm(64)
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).unbind(2)
        beta = k.mean(-1).sigmoid()
        y, _ = self.rule(q, k, v, -beta, beta)
        if self.with_norm:
            y = y / (1 + y.square().sum((2, 3), keepdim=True))
            y, _ = self.rule(y, k, v, -beta, beta)
        return self.out(y.flatten(2))


def kept(mesh, mixers, **options):
    """The step of the pass on a kept call."""
    with stand_ins() as kernels:
        module, x = Kept(kernels, **options), torch.zeros(1, 1, 1).expand(1, 64, 64)
        steps = capture(module, x, mesh=mesh, strategy=mixers, until="exchange_mixers")
    return steps["exchange_mixers"]


def test_kept_calls(mesh):
    """What is between two rules reads all heads of a token."""
    steps = {
        "by heads": kept(mesh, "exchange"),
        "a norm over heads on tokens": kept(mesh, "exchange", norm=True),
    }
    assert_golden(
        table({name: ", ".join(exchanges(step)) for name, step in steps.items()}),
        """\
by heads: unflatten 1>3, mixer_default[0] 2>1
a norm over heads on tokens: unflatten 1>3, mixer_default[0] 2>1, add 1>None,
    mixer_default_1[0] 2>1""",
    )
    step = kept(mesh, "states")
    assert step.rewrites == 1 and exchanges(step) == []
    (call,) = lines_with(step.after, "mixed_in_parts(").splitlines()
    assert "chunk_gated_delta_rule" in call


@pytest.mark.parametrize("mesh", [8], indirect=True)
def test_a_kept_call_of_few_heads(mesh):
    """Four heads of sixteen channels: ranks share channels, and read all keys."""
    assert_golden(
        ", ".join(exchanges(kept(mesh, "exchange"))),
        """\
unbind[0] 1>None, unbind[1] 1>None, unbind[2] 1>3, beta 1>None, neg 1>None,
    mixer_default[0] 3>1""",
    )


class LanguageModel(torch.nn.Module):
    """An embedding, and a mixer that is no attention."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mixer = torch.nn.Embedding(9, 512), LinearAttention(512)

    def forward(self, ids):
        return self.mixer(self.embedding(ids))


def test_without_attention_the_indices_of_an_embedding_are_the_sequence(mesh):
    ids = torch.zeros(1, 4096, dtype=torch.int64)
    with warnings() as texts:
        steps = capture(LanguageModel(), ids, mesh=mesh)
    assert steps["exchange_mixers"].rewrites == 2
    inputs = [(x.name, x.dim) for x in steps.ctx.inputs.values() if x.dim is not None]
    assert inputs == [("ids", 1)] and texts == []


class Direct(torch.nn.Module):
    """A mixer that reads inputs of the graph: all gathers stand after the last one."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, q, k, v, g, beta):
        return self.mix(q, k, v, g, beta)[0]


def test_operands_are_gathered_in_one_order_on_all_ranks(mesh):
    """An order by addresses, as that of a set, would be another one on each rank."""
    wide, narrow = torch.zeros(1, 16, 2, 4), torch.zeros(1, 16, 2)
    inputs = (wide, wide.clone(), wide.clone(), narrow, narrow.clone())
    with stand_ins() as kernels:
        step = capture(
            Direct(kernels["chunk_gated_delta_rule"]),
            *inputs,
            mesh=mesh,
            shard=dict.fromkeys(("q", "k", "v", "g", "beta"), 1),
            strategy="gather",
            until="exchange_mixers",
        )["exchange_mixers"]
    gathered = [x.split()[0] for x in exchanges(step)]
    assert gathered == ["l_beta_", "l_g_", "l_v_", "l_k_", "l_q_"]
