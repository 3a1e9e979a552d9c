"""Attention calls become cp:: operators, under masks too; all else stays as it is."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import cpcompile as cp
from cpcompile import config
from cpcompile.ranks.mesh_factors import hybrid_groups
from cpcompile.reporting.graph_report import recording
from tests.golden.capture import capture, capture_pass, changes, localised
from tests.golden.golden_text import assert_golden, table
from tests.golden.laid_out import attend
from tests.golden.operands import QKV, causal, make_qkv, sdpa


def inserted(fn, *inputs, count=1, **options):
    """The step of the pass."""
    step = capture_pass("insert_attention", fn, *inputs, **{"shard": QKV} | options)
    assert step.rewrites == count
    return step


def test_strategies(mesh):
    """Of sharded inputs the graph is the same; only the placements differ."""
    inputs = make_qkv(2, 4, 16, 8)
    steps = []
    for name in ("ring", "all_gather", "ulysses"):
        plain = inserted(causal, *inputs, strategy=name, mesh=mesh)
        parts = [cp.shard(x, mesh, 2) for x in inputs]
        step = inserted(causal, *parts, strategy=name, shard={})
        assert step.before.count(" S(2)") == step.after.count(" S(2)") == 4
        assert step.after.replace(" S(2)", "") == plain.after
        steps.append(plain)
    assert_golden(
        "\n".join(map(changes, steps)),
        """\
+ ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP)
~ return: scaled_dot_product_attention -> ring_attention_default[0]
- scaled_dot_product_attention
+ all_gather_attention_default = cp.all_gather_attention(l_q_, l_k_, l_v_,
    sizes=[16, 16], spec='causal scale=0.353553', group=GROUP)
~ return: scaled_dot_product_attention -> all_gather_attention_default[0]
- scaled_dot_product_attention
+ ulysses_attention_default = cp.ulysses_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP)
~ return: scaled_dot_product_attention -> ulysses_attention_default[0]
- scaled_dot_product_attention""",
    )


@pytest.mark.parametrize("inner", ["ulysses", "ring"])
def test_hybrid(mesh, inner):
    """The mesh axis called "ulysses" exchanges heads; the other one is the ring."""
    names = ("ring", "ulysses") if inner == "ulysses" else ("ulysses", "ring")
    given = {"mesh": init_device_mesh("cpu", (4, 2), mesh_dim_names=names)}
    given |= {"axis": names, "strategy": "hybrid", "shard": QKV}
    inputs = make_qkv(2, 4, 16, 8)
    captured = capture(causal, *inputs, until="insert_attention", **given)
    step = captured["insert_attention"]
    assert step.rewrites == 1
    (plan,) = captured.ctx.findings.plans.values()
    groups = hybrid_groups(captured.ctx.mesh, 0, plan.chosen.degrees)
    assert groups.ring == given["mesh"].get_group("ring").group_name
    assert groups.ulysses == given["mesh"].get_group("ulysses").group_name
    text = changes(step).replace(str(inner == "ulysses") + ")", "INNER)")
    assert_golden(
        text,
        """\
+ hybrid_attention_default = cp.hybrid_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP, ulysses_group=ULYSSES, ring_group=RING,
    ulysses_inner=INNER)
~ return: scaled_dot_product_attention -> hybrid_attention_default[0]
- scaled_dot_product_attention""",
    )


def grouped(q, k, v):
    return sdpa(q, k, v, enable_gqa=True)


def keywords(q, k, v):
    return sdpa(value=v, key=k, query=q, is_causal=True, scale=0.5)


CALLS = {
    "three dimensions": (causal, make_qkv(4, 16, 8), {"q": 1, "k": 1}),
    # Without enable_gqa: torch broadcasts one head, and so does the operator.
    "one key head": (causal, make_qkv(2, 4, 16, 8, kv_heads=1), {"q": 2}),
    "grouped heads": (grouped, make_qkv(2, 4, 16, 8, kv_heads=2), QKV),
    "keywords and scale": (keywords, make_qkv(2, 4, 16, 8), QKV),
    "two lengths": (
        causal,
        (torch.randn(2, 4, 16, 8), torch.randn(2, 4, 24, 8), torch.randn(2, 4, 24, 6)),
        QKV,
    ),
}


def test_calls(mesh):
    texts = {}
    for name, (fn, inputs, shard) in CALLS.items():
        text = changes(inserted(fn, *inputs, mesh=mesh, shard=shard))
        texts[name] = text.split("\n~")[0].removeprefix("+ ring_attention_default = ")
    assert_golden(
        table(texts),
        """\
three dimensions:
  + unsqueeze = unsqueeze(l_q_, 1)
  + unsqueeze_1 = unsqueeze(l_k_, 1)
  + unsqueeze_2 = unsqueeze(l_v_, 1)
  + ring_attention_default = cp.ring_attention(unsqueeze, unsqueeze_1, unsqueeze_2,
      sizes=[16, 16], spec='causal scale=0.353553', group=GROUP)
  + squeeze = squeeze(ring_attention_default[0], 1)
one key head: cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.353553', group=GROUP)
grouped heads: cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='scale=0.353553', group=GROUP)
keywords and scale: cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 16],
    spec='causal scale=0.5', group=GROUP)
two lengths: cp.ring_attention(l_q_, l_k_, l_v_, sizes=[16, 24],
    spec='causal scale=0.353553', group=GROUP)""",
    )


def test_checkpoint_region(mesh):
    def recomputed(q, k, v):
        return checkpoint(causal, q, k, v, use_reentrant=False)

    inputs = [x.requires_grad_() for x in make_qkv(2, 4, 16, 8)]
    step = inserted(recomputed, *inputs, mesh=mesh)
    call = "ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_, "
    assert f"\n    {call}" in step.after, "in the region"


def test_the_policy_of_a_checkpoint_keeps_our_attention(mesh):
    """It names torch's attention; else the ring would run again in the backward."""
    saved = [torch.ops.aten._scaled_dot_product_flash_attention.default]
    kept = functools.partial(create_selective_checkpoint_contexts, saved)
    options = {"mesh": mesh, "shard": QKV, "strategy": "ring", "inner": "aot_eager"}
    flops = []
    for how in ({}, {"context_fn": kept}):

        def region(q, k, v, how=how):
            return checkpoint(causal, q, k, v, use_reentrant=False, **how)

        with recording() as reports:
            run = torch.compile(region, backend="cp", options=options)
            run(*(x.requires_grad_() for x in make_qkv(2, 4, 16, 8))).sum().backward()
        flops.append(reports[0].account.graphs[1].work.flops)
    assert flops[0] > flops[1]


def test_attention_to_the_result_of_attention(mesh):
    """The operand of the second call is a node that the first rewrite replaces."""

    def twice(q, k, v):
        return causal(causal(q, k, v), k, v)

    step = inserted(twice, *make_qkv(2, 4, 16, 8), count=2, mesh=mesh)
    assert "cp.ring_attention(getitem, l_k_, l_v_, sizes=[16, 16]" in step.after


def test_heads_in_groups(mesh):
    """Under a budget that an exchange of all heads does not meet; the twin does."""
    options = {"strategy": "ulysses", "mesh": mesh}
    with config.patch(memory_budget=2 * 2**20):
        larger = inserted(causal, *make_qkv(1, 64, 128, 64), **options)
        smaller = inserted(causal, *make_qkv(1, 64, 64, 64), **options)
    assert "spec='causal scale=0.125 head_groups=2'" in larger.after
    assert "head_groups" not in smaller.after


def test_no_attention_stays(mesh):
    step = capture_pass(
        "insert_attention", lambda x: x.relu() + 1, torch.randn(2, 16), mesh=mesh
    )
    assert step.rewrites == 0
    assert not step.changed


def test_under_a_mask(mesh):
    """Integers per token, and what no integers say as a tensor."""

    def masked(q, k, v, padding):
        row = torch.arange(16)
        window = (row[None] <= row[:, None]) & (row[None] > row[:, None] - 5)
        mask = window & padding[:, None, None].bool()
        return sdpa(q, k, v, attn_mask=mask)

    padding = torch.ones(2, 16, dtype=torch.long)
    captured = capture(
        masked,
        *make_qkv(2, 4, 16, 8),
        padding,
        mesh=mesh,
        shard=QKV,
        until="insert_attention",
    )
    (mask,) = captured.ctx.findings.masks.values()
    assert mask.text == "causal, window 5, key padding"
    of_pairs = [x for x in captured.text.splitlines() if x.endswith("16, 16]")]
    assert not of_pairs, "nothing of all pairs is left"
    assert_golden(
        captured.lines("cp_constant = ", "cp_constant_1 =", "= cp.ring"),
        """\
cp_constant = cp_constant()  # [1, 16, 2]
cp_constant_1 = cp_constant()  # [1, 16]
ring_attention_default = cp.ring_attention(l_q_, l_k_, l_v_,
    [cp_constant, cp_constant_1, expand_default], sizes=[16, 16],
    spec='scale=0.353553 +key_ranges +q_segment_ids +kv_segment_ids', group=GROUP)""",
    )


def conv(x):
    return F.conv1d(x.transpose(1, 2), torch.ones(8, 1, 3), padding=1, groups=8).mT


# Relayouts that stay between two attentions: in front of the call and behind it.
MIXING = {
    "conv": (conv, 2),  # each rank borrows the tokens beside its own
    "roll": (lambda x: x.roll(1, 1), 0),  # zigzag to zigzag, of few tokens
    "cumsum": (lambda x: x.cumsum(1), 2),
    "flip": (lambda x: x.flip(1), 0),
    "halves": (lambda x: torch.cat([x[:, 16:], x[:, :16]], 1), 2),
    "softmax over tokens": (lambda x: x.softmax(1), 2),
    "mean over tokens": (lambda x: x - x.mean(1, keepdim=True), 0),
    "scores": (lambda x: (x @ x.mT) @ x, 2),
    "attention by hand": (lambda x: (x @ x.mT).softmax(-1) @ x, 0),
    "windows": (lambda x: x.unflatten(1, (16, 2)).flip(2).flatten(1, 2), 2),
    "sort": (lambda x: x.sort(1).values, 2),
}
TOKEN_WISE = {
    "norm": lambda x: F.layer_norm(x, (8,)),
    "linear": lambda x: x @ torch.ones(8, 8),
    "flat": lambda x: x.reshape(-1, 8).tanh().reshape(2, 32, 8),
    "tokens first": lambda x: (
        x.transpose(0, 1).reshape(-1, 8).tanh().view(32, 2, 8).mT.mT.transpose(0, 1)
    ),
    "positions": lambda x: x + torch.linspace(0, 1, 32)[:, None],
    "table": lambda x: x * torch.ones(1, 32, 8).cumsum(1),
    "channels": lambda x: torch.cat([x[..., 4:], x[..., :4]], -1),
    "where": lambda x: torch.where((torch.arange(32) < 5)[:, None], x, -x),
    "gate": lambda x: x * x.sigmoid(),
    "several": lambda x: sum(x.chunk(2, -1)).repeat(1, 1, 2),
    "experts": lambda x: x.softmax(-1).topk(8, -1).values,
}


def between_attentions(call, mesh):
    return localised(
        lambda x: attend(call(attend(x))),
        torch.randn(2, 32, 8),
        mesh=mesh,
        shard={"x": 1},
        strategy="ring",
        layout="zigzag",
    )


@pytest.mark.parametrize("name", MIXING)
def test_a_mixing_call_between_two_attentions(mesh, name):
    """Its operand is brought back, and its result laid out again."""
    mix, left = MIXING[name]
    report = between_attentions(mix, mesh).report
    assert (report.relayouts_left, report.relayouts_cancelled) == (left, 8 - left)


@pytest.mark.parametrize("name", TOKEN_WISE)
def test_a_token_wise_call_between_two_attentions(mesh, name):
    """Tokens are in order again for the result alone, which is gathered."""
    local = between_attentions(TOKEN_WISE[name], mesh)
    report = local.report
    assert (report.relayouts_left, report.relayouts_cancelled) == (0, 8)
    assert local.text.count("= _c10d_functional.all_gather") == 1
