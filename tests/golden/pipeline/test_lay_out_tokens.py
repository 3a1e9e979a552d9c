"""Relayouts go to the edges of the graph, or stay where tokens meet."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import cpcompile as cp
from cpcompile import logs
from cpcompile.passes.model.layouts.layout_cut import LayoutCut
from tests.golden.capture import capture, changes, fake_mesh, warnings
from tests.golden.golden_text import assert_golden
from tests.golden.laid_out import attend, laid_out, moves, sdpa
from tests.models.families.small_gpt import SmallGPT


def test_a_decoder_has_none_left(mesh):
    """Only ids, labels and positions are laid out; the loss does not care."""
    torch.manual_seed(0)
    model = SmallGPT(vocabulary=16, width=8, heads=2, layers=1, context=64)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    captured = capture(
        lambda tokens, labels: model(tokens, labels)[1],
        tokens,
        tokens.clone(),
        mesh=mesh,
        shard={"tokens": 1, "labels": 1},
        layout="zigzag",
    )
    assert moves(captured) == (0, 4)
    assert_golden(
        changes(captured["lay_out_tokens"]),
        """\
+ cp_shard = cp_place(l_tokens_, (S(1),), 32, 'zigzag')
+ cp_shard_1 = cp_place(positions, (S(0),), 32, 'zigzag')
~ ring_attention_default: spec='causal scale=0.5' -> spec='causal zigzag scale=0.5'
~ cp_place: (reshape, (_S(0, 2),)) -> (reshape, (_S(0, 2),), 32, 'zigzag')
- cp_shard, cp_shard""",
    )


def test_every_layer_and_checkpoint_region(mesh):
    model = SmallGPT(
        vocabulary=16, width=8, heads=2, layers=3, context=64, checkpointed=(0, 1)
    )
    tokens = torch.zeros(2, 32, dtype=torch.long)
    for layout in ("zigzag", "striped", "fold"):
        captured = capture(model, tokens, mesh=mesh, shard={"tokens": 1}, layout=layout)
        assert moves(captured) == (0, 12)
        assert captured.text.count(f"{layout} scale=") == 3


def test_results_are_in_natural_order(mesh):
    captured = laid_out(lambda x: (attend(x), attend(x).sum(), attend(x).mean(1)), mesh)
    assert moves(captured) == (0, 12)
    assert_golden(
        captured.lines("cp_gather", "return"),
        """\
cp_gather = cp_gather_tokens(flatten, 32, 'zigzag')  # [2, 32, 8]
cp_gather_1 = cp_gather(sum_1)  # []
cp_gather_2 = cp_gather(cp_mean)  # [2, 8]
return (cp_gather, cp_gather_1, cp_gather_2)""",
    )


def test_sharded_inputs_and_results_pay_for_ids_and_hidden_states(mesh):
    """Logits are wider than hidden states, so that these are brought back."""
    model = SmallGPT(vocabulary=512, width=8, heads=2, layers=2, context=64)
    tokens = cp.shard(torch.zeros(2, 32, dtype=torch.long), mesh, 1)
    captured = capture(model, tokens, layout="zigzag")
    assert moves(captured) == (2, 6)
    assert_golden(
        captured.lines("= cp.relayout"),
        """\
relayout_default = cp.relayout(cp_from_local, dim=1, length=32, source='contiguous',
    target='zigzag', group=GROUP)  # [2, 32] S(1)
relayout_default_1 = cp.relayout(x_3, dim=1, length=32, source='zigzag',
    target='contiguous', group=GROUP)  # [2, 32, 8] S(1)""",
    )


def test_inputs_that_are_laid_out_already(mesh):
    tokens = cp.shard(torch.zeros(2, 32, dtype=torch.long), mesh, 1, layout="striped")
    model = SmallGPT(vocabulary=512, width=8, heads=2, layers=2, context=64)
    captured = capture(lambda tokens: model(tokens)[0].sum(), tokens, layout="auto")
    assert moves(captured) == (0, 8)
    assert captured.text.count("striped scale=") == 2


def test_dropout_does_not_stop_them(mesh):
    """The mask is drawn whole on every rank, and each takes its tokens of it."""
    captured = laid_out(lambda x: attend(F.dropout(attend(x), 0.1)), mesh)
    assert moves(captured) == (0, 8)
    assert_golden(
        captured.lines("dropout", "= mul"),
        """\
cp_dropout_mask = cp_dropout_mask(flatten, 0.1)  # [2, 32, 8]
cp_replicate = cp_replicate(cp_dropout_mask)  # [2, 32, 8] R
mul = mul(flatten, cp_place)  # [2, 32, 8] S(1)""",
    )


def test_a_table_is_placed_once_and_random_numbers_are_drawn_in_order(mesh):
    def layers(x):
        table = torch.linspace(0, 1, 32)[:, None]
        return attend(attend(x * table) * table)

    captured = laid_out(layers, mesh)
    assert moves(captured) == (0, 8)
    assert captured.text.count("cp_place(cp_replicate") == 1
    drawn = laid_out(lambda x: attend(torch.bernoulli(attend(x).sigmoid())), mesh)
    assert moves(drawn) == (1, 7)


def test_parameters_of_positions_get_their_gradient_in_order(mesh):
    positions = torch.nn.Parameter(torch.zeros(32, 8))
    captured = laid_out(lambda x: attend(x + positions), mesh)
    assert moves(captured) == (0, 4)
    assert_golden(
        captured.lines("= cp_place", "= add"),
        """\
cp_shard = cp_place(l_x_, (S(1),), 32, 'zigzag')  # [2, 32, 8] S(1)
cp_place = cp_place(cp_replicate, (S(0),), 32, 'zigzag')  # [32, 8] S(0)
add = add(cp_shard, cp_place)  # [2, 32, 8] S(1)""",
    )


def test_attention_without_a_mask_takes_tokens_in_any_order(mesh):
    """Queries follow the layout of their layer, keys that of theirs."""

    def decoder(x, words):
        k = words.unflatten(-1, (2, -1)).transpose(1, 2)
        q = attend(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return attend(sdpa(q, k, k).transpose(1, 2).flatten(2))

    words = torch.randn(2, 16, 8)
    captured = laid_out(decoder, mesh, words, shard={"words": 1})
    assert moves(captured) == (0, 8)


def test_sequences_of_two_lengths_have_layouts_of_their_own(mesh):
    """32 tokens, and 16, of which two are as many as one of those."""

    def both(x, words):
        text = attend(words)
        k = text.unflatten(-1, (2, -1)).transpose(1, 2)
        q = attend(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return attend(sdpa(q, k, k).transpose(1, 2).flatten(2)), text

    words = torch.randn(2, 16, 8)
    captured = laid_out(both, mesh, words, shard={"words": 1})
    assert moves(captured) == (0, 12)
    assert_golden(
        captured.lines("cp_place", "cp_gather", "return"),
        """\
cp_shard = cp_place(l_words_, (S(1),), 16, 'zigzag')  # [2, 16, 8] S(1)
cp_shard_1 = cp_place(l_x_, (S(1),), 32, 'zigzag')  # [2, 32, 8] S(1)
cp_gather = cp_gather_tokens(flatten_3, 32, 'zigzag')  # [2, 32, 8]
cp_gather_1 = cp_gather_tokens(text, 16, 'zigzag')  # [2, 16, 8]
return (cp_gather, cp_gather_1)""",
    )


def test_a_region_that_mixes(mesh):
    def layers(x):
        x = checkpoint(lambda x: attend(attend(x).cumsum(1)), x, use_reentrant=False)
        return attend(x)

    captured = laid_out(layers, mesh)
    assert moves(captured) == (2, 10)  # to an exchange of channels, and from it
    assert "    relayout" in captured.text, "inside of the region"


def test_two_axes(mesh_2d):
    options = {"mesh": mesh_2d["cp"], "shard": {"x": 1}, "layout": "zigzag"}
    captured = capture(lambda x: attend(x + 1), torch.randn(2, 32, 8), **options)
    assert moves(captured) == (0, 4)
    x = cp.shard(torch.randn(4, 32, 8), mesh_2d, 1)
    captured = capture(lambda x: attend(x).reshape(-1, 8).sum(), x, layout="zigzag")
    assert moves(captured) == (1, 3)


def mixed(q, k, v):
    return sdpa(sdpa(q, k, v, is_causal=True).cumsum(2), k, v, is_causal=True)


@pytest.mark.parametrize(
    ("length", "left", "chosen"),
    [(2048, 0, "all_gather"), (524288, 3, "ring zigzag relaid")],
)
def test_relayouts_are_paid_for_where_they_save_more(mesh, length, left, chosen):
    shape = (1, 8, length, 128)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(3))
    options = {"mesh": mesh, "shard": dict.fromkeys("qkv", 2), "layout": "auto"}
    captured = capture(mixed, q, k, v, strategy="auto", **options)
    assert moves(captured) == (left, 8 - left)
    for plan in captured.ctx.findings.plans.values():
        assert plan.chosen.label == chosen
        (label,) = {c.label for c in plan.candidates if c.relayout}
        free = label.removesuffix(" relaid")
        (reason,) = {c.excluded for c in plan.candidates if c.label == free}
        if left:
            assert reason == "its relayouts stay in this graph"
        else:
            assert reason == "relayouts would cost more than it saves"


def test_every_rank_sees_the_same_prices(monkeypatch):
    """The last rank has three tokens, the first one four: all decide for one layout."""
    prices = []
    feed = LayoutCut.feed
    monkeypatch.setattr(LayoutCut, "feed", lambda *a: prices.append(a[-1]) or feed(*a))
    x, where = torch.randn(2, 31, 8), {"shard": {"x": 1}, "layout": "zigzag"}
    for rank in (0, 7):
        with fake_mesh(8, rank=rank) as mesh:
            capture(lambda x: attend(attend(x).cumsum(1)), x, mesh=mesh, **where)
    half = len(prices) // 2
    assert any(prices[:half])
    assert prices[:half] == prices[half:]


def test_the_other_strategies_have_layouts_too(mesh):
    captured = laid_out(attend, mesh, strategy="all_gather")
    assert "zigzag scale=" in captured.lines("cp.all_gather_attention")


@pytest.mark.parametrize("length", [5, 8])
def test_what_is_asked_for_and_not_done_is_warned_about(mesh, caplog, length):
    """Five tokens leave ranks empty; Ulysses has whole sequences."""
    logs.warn_once.cache_clear()
    strategy = "ring" if length == 5 else "ulysses"
    x = torch.randn(2, length, 16)
    options = {"mesh": mesh, "shard": {"x": 1}, "layout": "zigzag"}
    captured = capture(attend, x, strategy=strategy, **options)
    assert "zigzag scale=" not in captured.text
    texts = warnings(caplog)
    assert not texts[1:], texts
    (text,) = texts
    assert "attention at <top level>: layout 'zigzag' is not met" in text
