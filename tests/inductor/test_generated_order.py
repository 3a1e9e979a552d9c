"""The generated code communicates in one order on every rank, and after its steps.

37 tokens on 4 ranks are chunks of 10, 10, 10 and 7 tokens, so that Inductor meets other
sizes on the last rank.
"""

import re
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch.utils._runtime_estimation as runtime_estimation
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import cpcompile as cp
from cpcompile import config
from cpcompile.compile.overlap import check_overlap, shifts
from cpcompile.compile.ring_probe import ring_problem
from cpcompile.errors import RingOverlapError
from cpcompile.geometry.layout import Chunks
from cpcompile.geometry.visibility import visible_chunk
from cpcompile.ops.comm.ring_exchange import NOTHING_TO_HIDE_IT
from cpcompile.torch_patches import inductor_compat
from tests.golden.capture import fake_group, fake_mesh
from tests.models.families.small_gpt import SmallGPT

TOKENS = 37
_COMMUNICATION = re.compile(
    r"torch\.ops\.((?:cp|_c10d_functional)\.(?!wait)\w+)\.default\("
)


def communication(rank, strategy, unroll):
    """Per generated module, the calls that communicate and the steps, in order."""
    with fake_mesh(4, rank=rank) as mesh:
        torch.manual_seed(0)
        model = SmallGPT(vocabulary=32, width=32, layers=2, context=64)
        options = {"mesh": mesh, "shard": {"tokens": 1, "labels": 1}}
        options |= {"strategy": strategy}
        step = torch.compile(model, backend="cp", options=options)
        tokens = torch.randint(0, 32, (1, TOKENS))

        def train():
            step(tokens, tokens)[1].backward()

        settings = config.patch(unroll=unroll, gather_outputs_megabytes=0)
        with inductor_config.patch(fx_graph_cache=False), settings:
            _, codes = run_and_get_code(train)
    return [_COMMUNICATION.findall(code) for code in codes]


# Of two layers on four ranks: calls of the forward and of the backward. Attention
# between the exchanges of Ulysses is no operator of ours.
EXCHANGES = {"cp.ulysses_scatter": (2, 2), "cp.ulysses_gather": (2, 2)}
RINGS = {"cp.ring_attention": (2, 0), "cp.ring_attention_backward": (0, 2)}
CALLS = {
    ("ring", 0): RINGS,
    ("all_gather", 0): {
        "cp.all_gather_attention": (2, 0),
        "cp.all_gather_attention_backward": (0, 2),
    },
    ("ulysses", 0): EXCHANGES | dict.fromkeys(RINGS, (0, 0)),
    ("hybrid", 0): EXCHANGES | RINGS,
    ("ring", "auto"): dict.fromkeys(RINGS, (0, 0))
    | {"cp.ring_shift": (2 * 3, 2 * (3 + 4)), "cp.attention_step": (2 * 4, 0)}
    | {"cp.attention_step_backward": (0, 2 * 4)},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "unroll"), CALLS)
def test_first_and_last_rank_agree(strategy, unroll):
    first, last = (communication(rank, strategy, unroll) for rank in (0, 3))
    assert first == last
    for call, counts in CALLS[strategy, unroll].items():
        assert tuple(calls.count(call) for calls in first) == counts
    assert "_c10d_functional.all_reduce_" in first[1]


_GROUPS = re.compile(
    r"torch\.ops\.(?:cp\.ulysses_(\w+)|aten\.(_scaled_dot\w+))\.default\("
)


def of_groups(rank):
    """The exchanges of three groups of heads, and attention to them, in order."""

    def attend(x, weight):
        q, k, v = (x @ weight).unflatten(2, (3, 12, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with fake_mesh(4, rank=rank) as mesh:
        options = {"mesh": mesh, "shard": {"x": 1}, "strategy": "ulysses"}
        step = torch.compile(attend, backend="cp", options=options)
        weight = torch.zeros(16, 3 * 12 * 4, requires_grad=True)
        need = cp.plan(
            batch=1,
            heads=12,
            kv_heads=12,
            head_dim=4,
            seq=TOKENS,
            ranks=4,
            dtype="float32",
        )
        (whole,) = (c for c in need.candidates if c.label == "ulysses")

        def train():
            step(torch.zeros(1, TOKENS, 16), weight).sum().backward()

        with (
            inductor_config.patch(fx_graph_cache=False),
            config.patch(memory_budget=whole.peak_extra_bytes - 1),
        ):
            _, codes = run_and_get_code(train)
    return [["".join(x) for x in _GROUPS.findall(code)] for code in codes]


@pytest.mark.timeout(300)
def test_messages_of_other_groups_travel_beside_attention():
    """A group of heads is sent before the one before it is attended to."""
    first, last = of_groups(0), of_groups(3)
    assert first == last
    forward, backward = first
    attend = "_scaled_dot_product_flash_attention_for_cpu"
    assert forward == [
        *("scatter_start", "scatter_start"),
        *("scatter_finish", attend, "gather_start", "scatter_start"),
        *("scatter_finish", attend, "gather_finish", "gather_start"),
        *("scatter_finish", attend, "gather_finish", "gather_start"),
        "gather_finish",
    ]
    assert backward == [
        *("scatter_start", "scatter_finish", "scatter_start"),
        *(attend + "_backward", "gather_start", "scatter_finish", "scatter_start"),
        *(attend + "_backward", "gather_start", "gather_finish", "scatter_finish"),
        *(attend + "_backward", "gather_start", "gather_finish", "gather_finish"),
    ]


def attention(x, w_in, w_out):
    """A layer with something to move around its ring, and gradients to reduce."""
    q, k, v = (x @ w_in).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (out.transpose(1, 2).flatten(2) @ w_out).square().sum()


def train(ranks, **options):
    """One training step of `attention` on this rank of a fake group."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    options |= {"mesh": mesh, "shard": {"x": 1}, "strategy": "ring"}
    options.setdefault("layout", "contiguous")
    step = torch.compile(attention, backend="cp", fullgraph=True, options=options)
    weights = [torch.zeros(16, n, requires_grad=True) for n in (48, 16)]
    step(torch.zeros(1, TOKENS, 16), *weights).backward()


REORDERED = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "reorder_communication_preserving_peak_memory",
        "sink_waits_iterative",
        "reorder_communication_preserving_peak_memory",
    ],
}
SCHEDULED = {
    "aten_distributed_optimizations.enable_overlap_scheduling": True,
    "aten_distributed_optimizations.compute_estimator": "analytical",
}
SIMPLE_OVERLAP = "aten_distributed_optimizations.enable_simple_overlap"  # torch 2.15
SETTINGS = {
    "default": {},  # of torch 2.15: with simple overlap
    "no simple overlap": {SIMPLE_OVERLAP: False},
    "memory": {"reorder_for_peak_memory": True},
    "order of the graph": {"reorder_for_peak_memory": False},
    "communication": REORDERED,
    "communication, order of the graph": REORDERED | {"reorder_for_peak_memory": False},
    "overlap scheduling": SCHEDULED,
}


@contextmanager
def settings(name):
    """Inductor with these settings; skips where torch has none of the name."""
    for option in SETTINGS[name]:
        if not hasattr(inductor_config, option):
            pytest.skip(f"this torch has no {option}")
    changes = inductor_config.patch({"fx_graph_cache": False} | SETTINGS[name])
    # The scheduler asks for a GPU's memory bandwidth, whatever the device is.
    names = ("get_gpu_dram_gbps", "get_device_dram_gbps")  # up to torch 2.14, and since
    name = next(x for x in names if hasattr(runtime_estimation, x))
    bandwidth = mock.patch.object(runtime_estimation, name, lambda *device: 1000)
    with changes, bandwidth:
        yield


def messages(rank, ranks):
    """What the shifts of forward and backward say, in the order of the ring."""
    chunks = Chunks(TOKENS, ranks)

    def sees(step):
        """Whether there is a step of this number, with anything to compute."""
        source = (rank - step) % ranks
        place = [(chunks.start(r), chunks.count(r)) for r in (rank, source)]
        visible = visible_chunk(*place[0], *place[1], chunks.size, True)
        return step < ranks and not visible.is_empty

    def text(what, direction, step, hidden):
        name = f"{what} of the {direction} of ring attention, step {step}"
        return name if hidden else name + NOTHING_TO_HIDE_IT

    forward, backward = [], []
    for step in range(ranks):
        if step + 1 < ranks:
            place = (step, sees(step))
            forward.append(text("keys and values", "forward", *place))
            backward.append(text("keys and values", "backward", *place))
        # aten's kernels give dK and dV with dQ: the next step hides them.
        backward.append(text("dk and dv", "backward", step, sees(step + 1)))
    return forward, backward


RANKS = [(1, 2), (0, 4), (3, 4)]
CASES = [(name, *place) for name in SETTINGS for place in RANKS]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "rank", "ranks"), CASES)
def test_every_message_is_hidden(name, rank, ranks):
    with settings(name), fake_group(rank, ranks):
        _, codes = run_and_get_code(lambda: train(ranks))
    expected = messages(rank, ranks)
    assert [len(x) for x in expected] == [ranks - 1, ranks - 1 + ranks]
    for code, texts in zip(codes, expected, strict=True):
        assert [shift.where for shift in shifts(code)] == texts
        check_overlap(code)


def received_at_once(code):
    """The most received tensors that exist at a time."""
    whole, existing, most = set(), set(), 0
    for line in code.splitlines():
        if match := _SHIFT.search(line):
            whole.add(match[1])
        elif (match := _PART.match(line)) and match[2] in whole:
            existing.add(match[1])
            most = max(most, len(existing))
        elif line.strip().startswith("del "):
            existing -= set(re.findall(r"\w+", line))
    return most


_SHIFT = re.compile(r"(\w+) = torch\.ops\.cp\.ring_shift\.default\(")
_PART = re.compile(r"\s*(\w+) = (\w+)\[\d+\]")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["default", "no simple overlap"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_a_ring_has_two_buffers(name, ranks):
    """Of keys and values: those of this step, and those that arrive meanwhile."""
    with settings(name), fake_group(ranks - 1, ranks), uncompiled():
        _, (forward, backward) = run_and_get_code(lambda: train(ranks))
    assert received_at_once(forward) == 2 * 2
    assert received_at_once(backward) == 2 * 3


@contextmanager
def uncompiled():
    """Inductor writes C++ that is not compiled; what is computed is nothing."""

    def nothing(*_, **__):
        return lambda *_: None

    with mock.patch.object(AsyncCompile, "cpp_pybinding", nothing):
        yield


def unordered(make, after):
    """`inductor_compat.ordered` without the order."""
    return make()


@pytest.fixture
def lose_order(monkeypatch):
    """Call it to lose the order, in a torch that is known to keep it."""
    assert ring_problem("cpu") is None
    return lambda: monkeypatch.setattr(inductor_compat, "ordered", unordered)


def compile_error(name, **options):
    with (
        settings(name),
        fake_group(1, 2),
        config.patch(check_overlap=True),
        pytest.raises(BackendCompilerFailed) as caught,
    ):
        train(2, **options)
    return caught.value.inner_exception


@pytest.mark.parametrize("strict", [True, False])
def test_an_order_that_is_lost_is_noticed(lose_order, strict):
    """Without `after`, sinking waits and raising shifts undoes what the ring wants."""
    lose_order()
    error = compile_error("communication", strict=strict)
    assert isinstance(error, RingOverlapError)
    assert "dk and dv of the backward of ring attention, step 0 is sent" in str(error)


def test_rings_that_are_not_unrolled_are_not_checked(lose_order):
    lose_order()
    watched = config.patch(check_overlap=True, unroll=0)
    with settings("communication"), fake_group(1, 2), watched:
        train(2)


def test_code_from_the_cache_is_checked_too(monkeypatch):
    assert ring_problem("cpu") is None
    with fresh_cache(), inductor_config.patch(REORDERED), fake_group(1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(inductor_compat, "ordered", unordered)
            train(2)
        torch._dynamo.reset()
        counters["inductor"].clear()
        raises = pytest.raises(BackendCompilerFailed, match="RingOverlapError")
        with config.patch(check_overlap=True), raises:
            train(2)
        assert counters["inductor"]["fxgraph_cache_hit"] == 2


def test_a_graph_without_calls_has_nothing_to_check():
    def add(x, y):
        return x + y

    with fake_mesh(2) as mesh, config.patch(check_overlap=True):
        x, y = (cp.shard(torch.ones(4, 8), mesh, 1).requires_grad_() for _ in range(2))
        torch.compile(add, backend="cp", fullgraph=True)(x, y).sum().backward()
