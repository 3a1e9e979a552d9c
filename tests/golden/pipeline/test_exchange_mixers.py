"""What mixes tokens is computed in parts along heads, channels or rows of a batch."""

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.against_one_process import warnings
from tests.golden.capture import capture, changes
from tests.golden.golden_text import assert_golden, table
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
    """(from, to) of every exchange."""
    found = []
    for line in step.after.splitlines():
        if "'exchanged'" in line:
            *_, source, target = line.split("constraint(")[1].split(")")[0].split(", ")
            found.append((int(source), int(target)))
    return found


def stays(step):
    return step.rewrites == 0 and not step.changed


def test_sums_over_tokens_by_heads_or_rows(mesh):
    """All between the projections is on heads; rows of a batch need one exchange."""
    steps = {
        "heads": exchanged(LinearAttention(512), mesh),
        "rows": exchanged(LinearAttention(512), mesh, batch=2),
    }
    assert [step.rewrites for step in steps.values()] == [2, 2]
    assert_golden(
        table({name: changes(step) for name, step in steps.items()}),
        """\
heads:
  + constraint = constraint(q_2, 'exchanged', 1, 2)
  + constraint_1 = constraint(k_2, 'exchanged', 1, 2)
  ~ unsqueeze: k_2 -> constraint_1
  + constraint_2 = constraint(unsqueeze_1, 'exchanged', 1, 2)
  ~ mul: unsqueeze_1 -> constraint_2
  ~ cumsum_1: k_2 -> constraint_1
  ~ mul_1: q_2 -> constraint
  ~ unsqueeze_2: q_2 -> constraint
  + constraint_3 = constraint(truediv, 'exchanged', 2, 1)
  ~ flatten: truediv -> constraint_3
rows:
  + constraint = constraint(l_x_, 'exchanged', 1, 0)
  ~ layer_norm: l_x_ -> constraint
  + constraint_1 = constraint(truediv, 'exchanged', 0, 1)
  ~ flatten: truediv -> constraint_1""",
    )


def test_a_norm_over_heads_is_no_matter_of_heads(mesh):
    """Nor of channels: values of one token meet between two sums over the tokens."""
    assert stays(exchanged(NormOverHeads(512), mesh))
    step = exchanged(NormOverHeads(512), mesh, batch=2)
    assert exchanges(step) == [(1, 0), (0, 1)]


def test_convolutions_by_channels(mesh):
    """A rank needs no tokens of its neighbours where it has all tokens of channels."""
    by_fft = exchanged(LongConvolution(512), mesh)
    short = exchanged(ShortConvolutions(512), mesh)
    assert short.rewrites == 2
    assert_golden(
        table({"fft": changes(by_fft), "short": changes(short)}),
        """\
fft:
  + constraint = constraint(x, 'exchanged', 2, 1)
  ~ value: x -> constraint
  + constraint_1 = constraint(mixed, 'exchanged', 1, 2)
  ~ transpose_1: mixed -> constraint_1
short:
  + constraint = constraint(transpose, 'exchanged', 2, 1)
  ~ padded_convolution: transpose -> constraint
  + constraint_1 = constraint(transpose_2, 'exchanged', 2, 1)
  ~ padded_convolution_1: transpose_2 -> constraint_1
  + constraint_2 = constraint(transpose_4, 'exchanged', 2, 1)
  ~ padded_convolution_2: transpose_4 -> constraint_2
  + constraint_3 = constraint(truediv, 'exchanged', 2, 1)
  ~ flatten: truediv -> constraint_3""",
    )


@pytest.mark.parametrize("mesh", [4], indirect=True)
def test_a_convolution_that_reads_all_tokens(mesh):
    """One that reads few of others borrows these, and so does one of all channels."""

    class Kernel(LongKernel):
        """Its weight takes no memory."""

        taps = 1 << 16

        def __init__(self, width, of_channels=1):
            Mixer.__init__(self, width)
            weight = torch.zeros(1, 1, 1).expand(2 * width, of_channels, self.taps)
            self.filter = torch.nn.Parameter(weight)

    step = exchanged(Kernel(512), mesh, tokens=Kernel.taps)
    assert_golden(
        changes(step),
        """\
+ constraint = constraint(transpose, 'exchanged', 2, 1)
~ padded_convolution: transpose -> constraint
+ constraint_1 = constraint(padded_convolution, 'exchanged', 1, 2)
~ mixed: padded_convolution -> constraint_1""",
    )
    assert stays(exchanged(LongKernel(512), mesh, tokens=Kernel.taps))

    class OfAllChannels(Kernel):
        def __init__(self, width):
            super().__init__(width, width)

        def mix(self, q, k, v):
            padded = F.pad(v.transpose(1, 2), (self.taps - 1, 0))
            mixed = F.conv1d(padded, self.filter).transpose(1, 2)
            return q * mixed[..., : q.shape[-1]] * k

    assert stays(exchanged(OfAllChannels(512), mesh, tokens=Kernel.taps))


def test_tokens_that_a_stem_makes(mesh):
    step = exchanged(AfterStem(512), mesh, tokens=16384)
    assert step.rewrites == 2
    assert exchanges(step) == [(1, 2)] * 3 + [(2, 1)]


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
    assert exchanges(step) == [(1, 0), (0, 1)] * count


def test_a_loop_over_tokens(mesh):
    step = exchanged(GatedScan(4096), mesh, tokens=16)
    assert_golden(
        "\n".join(changes(step).splitlines()[:5]),
        """\
+ constraint = constraint(chunk[1], 'exchanged', 1, 2)
+ constraint_1 = constraint(gate, 'exchanged', 1, 2)
~ state: chunk[1][:, 0] -> constraint[:, 0]
~ getitem_4: gate[:, 0] -> constraint_1[:, 0]
~ getitem_5: gate[:, 0] -> constraint_1[:, 0]""",
    )


class Chunks(WrittenChunks):
    chunk = 1024


class OneProjection(Lightning):
    chunk = 1024


def test_chunks_of_tokens(mesh):
    """A tensor that is written to is split as what is written.

    A projection's weight has heads, too, but cutting it shares out nothing. Chunks of
    tokens of single heads are no sequences of the length of a chunk.
    """
    written, projected = (exchanged(x(512), mesh) for x in (Chunks, OneProjection))
    assert projected.rewrites == 12  # q, k and v in four chunks
    texts = {"written": changes(written), "one projection": changes(projected)}
    assert_golden(
        table(texts),
        """\
written:
  + constraint = constraint(transpose, 'exchanged', 2, 1)
  ~ q_1: transpose -> constraint
  + constraint_1 = constraint(transpose_1, 'exchanged', 2, 1)
  ~ k_1: transpose_1 -> constraint_1
  + constraint_2 = constraint(transpose_2, 'exchanged', 2, 1)
  ~ v_1: transpose_2 -> constraint_2
  + constraint_3 = constraint(flatten, 'exchanged', 1, 2)
  ~ transpose_3: flatten -> constraint_3
one projection:
  + constraint = constraint(transpose, 'exchanged', 2, 1)
  ~ chunk: transpose -> constraint
  + constraint_1 = constraint(cat, 'exchanged', 1, 2)
  ~ transpose_1: cat -> constraint_1""",
    )


def test_products_of_chunks_would_gather(mesh):
    """Chunks of q and k each lie on some ranks, and one of them has to be gathered."""

    class Chunks(Retention):
        chunk = 256

    step = exchanged(Chunks(512), mesh, tokens=1024)
    assert exchanges(step) == [(2, 1)] * 3 + [(1, 2)]


def test_what_ranks_can_share_stays(mesh):
    """Calls on single tokens, and sums that may wait."""

    class TokenWise(Mixer):
        def mix(self, q, k, v):
            return q * k.sigmoid() + v * (q * k).sum(1, keepdim=True)

    assert stays(exchanged(TokenWise(512), mesh))


@pytest.mark.parametrize("mesh", [8], indirect=True)
def test_too_few_heads_for_the_ranks_stay(mesh):
    """Four heads for eight ranks: not split, until they are split together."""
    step = exchanged(WrittenChunks(512), mesh, tokens=32)
    assert step.rewrites == 0


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
        "in parts of the tokens": kept(mesh, "states"),
        "a norm over heads on tokens": kept(mesh, "exchange", norm=True),
    }
    assert [step.rewrites for step in steps.values()] == [1, 1, 2]
    assert_golden(
        table({name: changes(step) for name, step in steps.items()}),
        """\
by heads:
  + constraint = constraint(unflatten, 'exchanged', 1, 3)
  ~ unbind: unflatten -> constraint
  + constraint_1 = constraint(mixer_default[0], 'exchanged', 2, 1)
  ~ flatten: mixer_default[0] -> constraint_1
in parts of the tokens:
  + mixer_default = mixed_in_parts([unbind[0], unbind[1], unbind[2], neg, beta],
      'fla.ops.gated_delta_rule:chunk_gated_delta_rule(unbind[0], unbind[1], unbind[2],
      g, beta)')
  - cp.mixer
a norm over heads on tokens:
  + constraint = constraint(unflatten, 'exchanged', 1, 3)
  ~ unbind: unflatten -> constraint
  + constraint_1 = constraint(mixer_default[0], 'exchanged', 2, 1)
  ~ square: mixer_default[0] -> constraint_1
  + constraint_2 = constraint(add, 'exchanged', 1, None)
  ~ y_1: add -> constraint_2
  + constraint_3 = constraint(mixer_default_1[0], 'exchanged', 2, 1)
  ~ flatten: mixer_default_1[0] -> constraint_3""",
    )


@pytest.mark.parametrize("mesh", [8], indirect=True)
def test_a_kept_call_of_few_heads(mesh):
    """Four heads of sixteen channels: ranks share channels, and read all keys."""
    step = kept(mesh, "exchange")
    assert step.rewrites == 1
    assert_golden(
        changes(step),
        """\
+ constraint = constraint(unbind[0], 'exchanged', 1, None)
+ constraint_1 = constraint(unbind[1], 'exchanged', 1, None)
+ constraint_2 = constraint(unbind[2], 'exchanged', 1, 3)
+ constraint_3 = constraint(beta, 'exchanged', 1, None)
+ constraint_4 = constraint(neg, 'exchanged', 1, None)
~ mixer_default: [unbind[0], unbind[1], unbind[2], neg, beta] -> [constraint,
    constraint_1, constraint_2, constraint_4, constraint_3]
+ constraint_5 = constraint(mixer_default[0], 'exchanged', 3, 1)
~ flatten: mixer_default[0] -> constraint_5""",
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
    gathered = [
        line.split("constraint(")[1].split(",")[0]
        for line in step.after.splitlines()
        if "'exchanged'" in line
    ]
    assert gathered == ["l_beta_", "l_g_", "l_v_", "l_k_", "l_q_"]
