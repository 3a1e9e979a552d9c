"""Mixers that are kept whole, in parts of dimensions or of tokens, against one process.

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
from cpcompile.accounting.graph_account import Purpose
from tests.cpu.against_one_process import compare, warnings
from tests.cpu.against_one_process import run as run_step
from tests.cpu.attention_cases import sequence_mesh
from tests.support.bounds import check, deviations
from tests.support.stand_in_kernels import stand_ins

HEADS, DIM = 4, 8
WIDTH = HEADS * DIM


class DeltaRule(nn.Module):
    """A gated delta rule of fla, with two values for each key."""

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
        o, state = self.mix(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
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


class SelectiveScan(nn.Module):
    """Mamba: channels by themselves, [B, D, S]."""

    def __init__(self, kernels):
        super().__init__()
        self.scan = kernels["selective_scan_fn"]
        self.projected = nn.Linear(WIDTH, 2 * WIDTH + 6)
        self.A = nn.Parameter(torch.rand(WIDTH, 3))

    def forward(self, x):
        parts = self.projected(x).transpose(1, 2).split([WIDTH, WIDTH, 3, 3], 1)
        y = self.scan(
            parts[0], parts[1], -self.A.exp(), *parts[2:], delta_softplus=True
        )
        return x + y.transpose(1, 2)


class Documents(nn.Module):
    """A gated delta rule that starts anew at token 5."""

    def __init__(self, kernels):
        super().__init__()
        self.mix = kernels["chunk_gated_delta_rule"]
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("starts", torch.tensor([0, 5, 12]))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        g, beta = -q.square().mean(-1), k.mean(-1).sigmoid()
        return self.mix(q, k, v, g, beta, cu_seqlens=self.starts)[0].flatten(2)


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


MODELS = {
    x.__name__: x
    for x in (
        DeltaRule, StateSpace, SelectiveScan, Documents, FusedStateSpace,
        FusedDocuments, FusedScan,
    )
}  # fmt: skip


def run(name, world, strategy, batch, tokens, inner="aot_eager"):
    """Compare a module whose mixer is shared by this strategy; count its calls."""
    counters.clear()
    with stand_ins() as kernels:
        comparison = compare(
            lambda: MODELS[name](kernels),
            (batch, tokens, WIDTH),
            world,
            strategy=strategy,
            inner=inner,
        )
    return comparison, counters["cpcompile"]["exchange_mixers"]


class AfterAttention(nn.Module):
    """A mixer after attention, and nothing between that needs the order of tokens."""

    def __init__(self, mixer):
        super().__init__()
        self.qkv, self.mixer = nn.Linear(WIDTH, 3 * WIDTH), mixer

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mixer(x + y.transpose(1, 2).flatten(2))


def run_in_layout(name, strategy, layout):
    with stand_ins() as kernels:
        return compare(
            lambda: AfterAttention(MODELS[name](kernels)),
            (1, 16, WIDTH),
            2,
            strategy=f"ring, {strategy}",
            layout=layout,
        )


@pytest.mark.slow(but=["DeltaRule-exchange"])
@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *(("DeltaRule", x) for x in ("exchange", "states", "gather")),
        ("SelectiveScan", "exchange"),  # of twice as many channels as tokens
    ],
)
def test_a_mixer_beside_attention_in_a_balanced_layout(pools, name, strategy):
    """Its tokens are in their order: attention alone works on zigzag."""
    arguments = (name, strategy, "zigzag")
    for comparison in pools[2].run(run_in_layout, *arguments, timeout=90):
        comparison.check()


CASES = [
    (name, world, strategy, *sizes)
    for name, strategies in (
        ("DeltaRule", ("exchange", "states", "gather")),
        ("StateSpace", ("exchange", "states", "gather")),
        ("SelectiveScan", ("exchange", "gather")),
        ("Documents", ("exchange", "gather")),
        ("FusedStateSpace", ("exchange", "states")),
        ("FusedDocuments", ("exchange", "gather")),
        ("FusedScan", ("exchange",)),
    )
    for strategy in strategies
    for world, *sizes in ((2, 2, 12), (2, 1, 13), (3, 1, 14))
    if not ("Documents" in name and sizes != [1, 13])
]


@pytest.mark.slow(but=["DeltaRule-3-states-1-14", "FusedDocuments-2-exchange-1-13"])
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("name", "world", "strategy", "batch", "tokens"), CASES)
def test_a_kernel_equals_one_process(pools, name, world, strategy, batch, tokens):
    """The inputs are inferred; nothing is warned of, but that all is gathered.

    Three ranks, which heads do not fill, share the channels of values.
    """
    arguments = (name, world, strategy, batch, tokens)
    for comparison, count in pools[world].run(run, *arguments, timeout=120):
        comparison.check()
        calls = 2 if name == "FusedDocuments" else 1  # a convolution of its own
        assert count == (0 if strategy == "gather" else calls)
        if strategy != "gather":
            assert comparison.warnings == []


@pytest.mark.slow(but=["exchange"])
@pytest.mark.timeout(150)
@pytest.mark.parametrize("strategy", ["exchange", "states"])
def test_inductor_runs_a_kernel(pools, strategy):
    arguments = ("DeltaRule", 2, strategy, 1, 16, "inductor")
    for comparison, count in pools[2].run(run, *arguments, timeout=120):
        comparison.check()
        assert count == 1


def of_many_lengths(strategy):
    """Deviations of one module on sequences of several lengths.

    And the number of programs, and of those whose mixer is shared.
    """
    torch._dynamo.reset()
    counters.clear()
    found = []
    with stand_ins() as kernels:
        torch.manual_seed(0)
        module = DeltaRule(kernels).double()
        options = {
            "mesh": sequence_mesh(2),
            "inner": "aot_eager",
            "strategy": strategy,
        }
        compiled = torch.compile(module, backend="cp", options=options)
        for tokens in (8, 12, 16, 11):
            x = torch.randn(1, tokens, WIDTH, dtype=torch.float64)
            results = [
                run_step(call, x.clone().requires_grad_(), module)
                for call in (compiled, module)
            ]
            found += deviations(*results)
    programs = counters["stats"]["unique_graphs"]
    return found, programs, counters["cpcompile"]["exchange_mixers"]


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize("strategy", ["exchange", "states"])
def test_a_kernel_takes_many_lengths(pools, strategy):
    """From the second length on the program is for many."""
    for found, programs, shared in pools[2].run(of_many_lengths, strategy, timeout=90):
        check(found)
        assert shared == programs < 4


def beside_data_parallelism():
    """Deviations and warnings where each of two pairs of ranks has a row of its own."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    with stand_ins() as kernels, warnings() as texts:
        torch.manual_seed(0)
        module = DeltaRule(kernels).double()
        options = {"mesh": mesh, "axis": "cp", "strategy": "states"}
        compiled = torch.compile(
            module, backend="cp", options={**options, "inner": "aot_eager"}
        )
        torch.manual_seed(mesh["dp"].get_local_rank())
        x = torch.randn(1, 11, WIDTH, dtype=torch.float64)
        found, wanted = (
            run_step(call, x.clone().requires_grad_(), module)
            for call in (compiled, module)
        )
    return deviations(found, wanted), texts


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_states_pass_along_one_axis_of_a_mesh(pools):
    for found, texts in pools[4].run(beside_data_parallelism, timeout=90):
        check(found)
        assert texts == []


def explained(name, strategy, tokens):
    """Bytes of mixers, the text of explain, and the shares of work."""
    torch._dynamo.reset()
    with stand_ins() as kernels:
        options = {
            "mesh": sequence_mesh(2),
            "strategy": strategy,
            "inner": "aot_eager",
        }
        module = MODELS[name](kernels)
        compiled = torch.compile(module, backend="cp", options=options)
        report = cp.explain(compiled, torch.randn(1, tokens, WIDTH).requires_grad_())
    sums = Counter()
    for graph in report.graphs:
        for account in graph.accounts:
            for exchange in account.exchanges:
                sums[exchange.purpose] += exchange.bytes
    return sums, str(report)


@pytest.mark.timeout(100)
def test_states_have_one_size_for_all_lengths(pools):
    (short, text), _ = pools[2].run(explained, "StateSpace", "states", 16)
    (long, _), _ = pools[2].run(explained, "StateSpace", "states", 64)
    state = HEADS * DIM * 6 * 4  # float32
    # A and B forward, two gradients backward, of one other rank.
    assert short[Purpose.MIXER] == long[Purpose.MIXER] == 4 * state
    assert "mixer mamba_chunk_scan_combined at " in text
    assert ": states (forced)" in text
    assert "runner-up gather" in text  # of two, at few tokens it has fewer messages


@pytest.mark.timeout(100)
@pytest.mark.slow
def test_an_exchange_grows_with_the_length(pools):
    (short, text), _ = pools[2].run(explained, "DeltaRule", "exchange", 16)
    (long, _), _ = pools[2].run(explained, "DeltaRule", "exchange", 64)
    assert long[Purpose.MIXER] == 4 * short[Purpose.MIXER] > 0
    assert "exchange along heads (forced)" in text
    assert short[Purpose.VALUE] == 0, text
