"""Mixers in parts of dimensions or of tokens, or kept whole, against one process.

Those of packages, those that models write, and torch's own scans.

Stand-ins take the place of packages whose kernels need a GPU.
"""

from collections import Counter

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import cpcompile as cp
from cpcompile.accounting.graph_account import GraphDirection, Purpose
from tests.cpu.against_one_process import compare, compare_calls, hidden_states
from tests.cpu.attention_cases import compiled_on
from tests.cpu.on_ranks import on_ranks
from tests.support.mixers import MIXERS
from tests.support.scans import SCANS
from tests.support.stand_in_kernels import stand_ins

HEADS, DIM = 4, 8
WIDTH = HEADS * DIM


class DeltaRule(nn.Module):
    """A gated delta rule of fla, with two values for each key."""

    documents = ()

    def __init__(self, kernels):
        super().__init__()
        self.mix = kernels["chunk_gated_delta_rule"]
        self.q, self.k = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.v, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gates = nn.Linear(WIDTH, 4 * HEADS)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (-1, DIM)) for y in (self.q(x), self.k(x), self.v(x))
        )
        g, beta = self.gates(x).chunk(2, -1)
        g, beta = F.logsigmoid(g), beta.sigmoid()
        given = {"use_qk_l2norm_in_kernel": True, **dict(self.documents)}
        o, state = self.mix(q, k, v, g=g, beta=beta, **given)
        assert state is None
        return x + self.out(o.flatten(2))


class StateSpace(nn.Module):
    """Mamba2: a convolution of causal_conv1d, and a scan of mamba_ssm."""

    def __init__(self, kernels):
        super().__init__()
        self.convolve = kernels["causal_conv1d_fn"]
        self.scan = kernels["mamba_chunk_scan_combined"]
        self.projected = nn.Linear(WIDTH, WIDTH + 2 * 6 + HEADS)
        self.conv = nn.Conv1d(WIDTH + 12, WIDTH + 12, 4, groups=WIDTH + 12)
        self.A = nn.Parameter(torch.rand(HEADS))
        self.D = nn.Parameter(torch.randn(HEADS))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y, dt = self.projected(x).split([WIDTH + 12, HEADS], -1)
        y = self.convolve(
            y.transpose(1, 2),
            self.conv.weight.squeeze(1),
            self.conv.bias,
            activation="silu",
        )
        y, b, c = y.transpose(1, 2).split([WIDTH, 6, 6], -1)
        y = self.scan(
            y.unflatten(-1, (HEADS, DIM)),
            dt,
            -self.A.exp(),
            b.unsqueeze(2),
            c.unsqueeze(2),
            chunk_size=8,
            D=self.D,
            dt_softplus=True,
        )
        return x + self.out(y.flatten(2))


class Documents(DeltaRule):
    """The same, which starts anew at token 5."""

    def __init__(self, kernels):
        super().__init__(kernels)
        self.register_buffer("starts", torch.tensor([0, 5, 12]))

    @property
    def documents(self):
        return {"cu_seqlens": self.starts}


class FusedStateSpace(nn.Module):
    """Mamba2 in one call of mamba_ssm: convolution, scan, norm and projection.

    Eight channels beside them are an MLP's.
    """

    documents = ()

    def __init__(self, kernels):
        super().__init__()
        self.fused = kernels["mamba_split_conv1d_scan_combined"]
        self.projected = nn.Linear(WIDTH, 8 + 2 * WIDTH + 2 * 2 * 3 + HEADS)
        self.conv = nn.Conv1d(WIDTH + 12, WIDTH + 12, 4, groups=WIDTH + 12)
        self.A, self.D = (nn.Parameter(torch.rand(HEADS)) for _ in range(2))
        self.bias, self.norm = nn.Parameter(torch.rand(HEADS)), nn.RMSNorm(WIDTH)
        self.out = nn.Linear(WIDTH + 4, WIDTH)

    def forward(self, x):
        return x + self.fused(
            self.projected(x),
            self.conv.weight.squeeze(1),
            self.conv.bias,
            self.bias,
            -self.A.exp(),
            D=self.D,
            chunk_size=8,
            rmsnorm_weight=self.norm.weight,
            outproj_weight=self.out.weight,
            outproj_bias=self.out.bias,
            headdim=DIM,
            ngroups=2,
            norm_before_gate=False,
            **dict(self.documents),
        )


class FusedDocuments(FusedStateSpace):
    """The same for documents that begin at tokens 0 and 5."""

    def __init__(self, kernels):
        super().__init__(kernels)
        starts = torch.tensor([[0] * 5 + [1] * 8], dtype=torch.int32)
        self.register_buffer("numbers", starts)

    @property
    def documents(self):
        return {"seq_idx": self.numbers}


class FusedScan(nn.Module):
    """Mamba in one call of mamba_ssm."""

    def __init__(self, kernels):
        super().__init__()
        self.fused = kernels["mamba_inner_fn"]
        self.projected = nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)
        self.x, self.dt = nn.Linear(WIDTH, 5 + 2 * 3), nn.Linear(5, WIDTH)
        self.A = nn.Parameter(torch.rand(WIDTH, 3))
        self.D, self.out = nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fused(
            self.projected(x).transpose(1, 2),
            self.conv.weight,
            self.conv.bias,
            self.x.weight,
            self.dt.weight,
            self.out.weight,
            None,
            -self.A.exp(),
            None,
            None,
            self.D,
            delta_bias=self.dt.bias,
        )


MODELS = {x.__name__: x for x in (
    DeltaRule, StateSpace, Documents, FusedStateSpace, FusedDocuments, FusedScan,
)}  # fmt: skip


class AfterAttention(nn.Module):
    """A mixer after attention, and nothing between that needs the order of tokens."""

    def __init__(self, mixer):
        super().__init__()
        self.qkv, self.mixer = nn.Linear(WIDTH, 3 * WIDTH), mixer

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mixer(x + y.transpose(1, 2).flatten(2))


def made(name, kernels):
    """A module, whose inputs are inferred where it calls a kernel."""
    return MODELS[name](kernels) if name in MODELS else (MIXERS | SCANS)[name]()


def run(name, world, strategy, batch, tokens, **options):
    """Compare a module whose mixer is shared by this strategy; count its calls."""
    counters.clear()
    named = {} if name in MODELS else {"shard": {"x": 1}}
    with stand_ins() as kernels:
        comparison = compare(
            lambda: made(name, kernels),
            (batch, tokens, WIDTH),
            world,
            **{"strategy": strategy} | named | options,
        )
    return comparison, counters["cpcompile"]["exchange_mixers"]


CASES = [
    (name, world, strategy, *sizes)
    for name, strategies in (
        ("DeltaRule", ("exchange", "states", "gather")),
        ("StateSpace", ("exchange", "states", "gather")),
        ("Documents", ("exchange", "gather")),
        ("FusedStateSpace", ("exchange", "states")),
        ("FusedDocuments", ("exchange", "gather")),
        ("FusedScan", ("exchange", "gather")),
    )
    for strategy in strategies
    for world, *sizes in ((2, 2, 12), (2, 1, 13), (3, 1, 14))
    if not ("Documents" in name and sizes != [1, 13])
]
# Rows of a batch, heads and channels that two ranks divide; and channels that three
# do not.
CASES += [
    (name, world, "exchange", batch, tokens)
    for name in MIXERS
    for world, batch, tokens in ((2, 2, 16), (2, 1, 16), (3, 1, 20))
]
CASES += [
    (name, world, "exchange", batch, 14)
    for name in SCANS
    for world, batch in ((2, 2), (2, 1), (3, 1))
]
CASES += [("Associative", world, "states", n, 14) for world, n in ((2, 2), (3, 1))]


def exchanged_calls(name, world, strategy, batch):
    """How many of its calls are shared; None if that is not said here.

    Four heads leave one of three ranks without any; others have channels, of which two
    that belong together may not come apart. A step of Elman needs all channels of a
    row. The scan of HeadNorm may stay, and its cumulative sum is exchanged.
    """
    if strategy == "gather" or (name == "Elman" and batch == 1):
        return 0
    if name in ("WrittenChunks", "LongKernel") and world == 3:
        return 0
    if name in MODELS:
        return 2 if name == "FusedDocuments" else 1  # a convolution of its own
    return None


@pytest.mark.parametrize(("name", "world", "strategy", "batch", "tokens"), CASES)
@on_ranks("world")
def test_a_mixer_equals_one_process(name, world, strategy, batch, tokens):
    """Nothing is warned of, but that all is gathered."""
    comparison, count = run(name, world, strategy, batch, tokens)
    comparison.check()
    if name == "HeadNorm":
        return
    wanted = exchanged_calls(name, world, strategy, batch)
    assert count > 0 if wanted is None else count == wanted
    if count or name in SCANS:
        assert len(comparison.warnings) == (not count)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(("DeltaRule", x) for x in ("exchange", "states", "gather")),
        ("FusedScan", "exchange"),  # of twice as many channels as tokens
        *(("Associative", x) for x in ("exchange", "states")),
    ],
)
@on_ranks(2)
def test_a_mixer_beside_attention_in_a_balanced_layout(name, strategy):
    """Its tokens are in their order: attention alone works on zigzag."""
    options = {"strategy": f"ring, {strategy}"}
    with stand_ins() as kernels:
        compare(
            lambda: AfterAttention(made(name, kernels)),
            (1, 16, WIDTH),
            2,
            layout="zigzag",
            **options,
        ).check()


@pytest.mark.parametrize("strategy", ["exchange", "states"])
@on_ranks(2)
def test_inductor_runs_a_kernel(strategy):
    comparison, count = run("DeltaRule", 2, strategy, 1, 16, inner="inductor")
    comparison.check()
    assert count == 1


@pytest.mark.parametrize("strategy", ["exchange", "states"])
@on_ranks(2)
def test_a_kernel_takes_many_lengths(strategy):
    """From the second length on the program is for many."""
    counters.clear()
    with stand_ins() as kernels:
        calls = [hidden_states(n, WIDTH) for n in (8, 12, 16, 11)]
        module = DeltaRule(kernels).double()
        compare_calls(module, calls, 2, strategy=strategy).check()
    programs = counters["stats"]["unique_graphs"]
    assert counters["cpcompile"]["exchange_mixers"] == programs < 4


@on_ranks(4)
def test_states_pass_along_one_axis_of_a_mesh():
    """Each of two pairs of ranks has a row of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    with stand_ins() as kernels:
        module = DeltaRule(kernels).double()
        torch.manual_seed(mesh["dp"].get_local_rank())
        options = {"mesh": mesh, "axis": "cp", "strategy": "states"}
        found = compare_calls(module, [hidden_states(11, WIDTH)], 4, **options)
    found.check()
    assert found.warnings == []


def explained(name, strategy, tokens):
    """Bytes by direction and purpose, and by purpose; and the text of explain."""
    torch._dynamo.reset()
    named = {} if name in MODELS else {"shard": {"x": 1}}
    with stand_ins() as kernels:
        compiled = compiled_on(2, made(name, kernels), strategy=strategy, **named)
        report = cp.explain(compiled, torch.randn(1, tokens, WIDTH).requires_grad_())
    sums = Counter()
    for x in report.exchanges:
        sums[x.direction, x.purpose] += x.bytes
        sums[x.purpose] += x.bytes
    return sums, str(report)


@on_ranks(2)
def test_states_have_one_size_for_all_lengths():
    short, text = explained("StateSpace", "states", 16)
    long, _ = explained("StateSpace", "states", 64)
    state = HEADS * DIM * 6 * 4  # float32
    # A and B forward, two gradients backward, of one other rank.
    assert short[Purpose.MIXER] == long[Purpose.MIXER] == 4 * state
    assert "mixer mamba_chunk_scan_combined at " in text
    assert ": states (forced)" in text
    assert "runner-up gather" in text  # of two, at few tokens it has fewer messages


@on_ranks(2)
def test_what_is_exchanged_is_listed():
    """q, k and v leave the side of the tokens and one result comes back."""
    listed, _ = explained("LinearAttention", "exchange", 16)
    _, text = explained("DeltaRule", "exchange", 16)
    assert "exchange along heads (forced)" in text
    # Of four parts of a float32 value one comes from the other rank.
    value = 16 * WIDTH * 4 // 4
    for direction in GraphDirection:
        assert listed[direction, Purpose.MIXER] == 4 * value
    assert not listed[Purpose.VALUE]
