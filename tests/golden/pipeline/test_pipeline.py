"""All passes together: every rank writes the same graph, and every pass is counted."""

import re
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import cpcompile as cp
from cpcompile.passes.pipeline import MODEL
from tests.golden.capture import RANKS, capture, fake_mesh, forget
from tests.models.families.small_gpt import SmallGPT

NAMES = [
    "inline_attention_modules",
    "number_rows",
    "functionalise_writes",
    "join_parts",
    "decompose_flex_attention",
    "fold_attention_patterns",
    "cut_before_products",
    "unflatten_losses",
    "align_operands",
    "split_window_views",
    "find_attention",
    "find_windows",
    "fold_kv_repeat",
    "rewrite_masks",
    "fold_moe_dispatch",
    "pad_tokens",
    "find_latents",
    "choose_strategy",
    "insert_attention",
    "pad_convolutions",
    "fold_transforms",
    "fold_scans",
    "split_pairs_by_rows",
    "exchange_mixers",
    "shard_graph",
    "lay_out_tokens",
]


def small_gpt():
    torch.manual_seed(0)
    return SmallGPT(vocabulary=16, width=8, heads=2, context=64, checkpointed=(1,))


def graph_of(rank, tokens, form, **options):
    """The text after all passes on one rank, and how many tokens that rank holds.

    Without the shapes of local tensors, which differ where the ranks hold more or less.
    """
    with fake_mesh(RANKS, rank=rank) as mesh:
        ids = torch.arange(2 * tokens).reshape(2, tokens) % 16
        part = cp.shard(ids, mesh, 1)
        if form == "sharded inputs":
            captured = capture(small_gpt(), part, **options)
        else:
            shard = {"tokens": 1, "labels": 1}
            captured = capture(
                small_gpt(), ids, ids.clone(), mesh=mesh, shard=shard, **options
            )
        assert captured.ctx.mesh.get_local_rank() == rank
        text = re.sub(r"(= input|= cp_to_local\(.*\))  # .*", r"\1", captured.text)
        return text, part.to_local().shape[1]


@pytest.mark.parametrize("form", ["plain inputs", "sharded inputs"])
@pytest.mark.parametrize(("tokens", "megabytes"), [(32, inf), (30, 0), (5, inf)])
def test_first_and_last_rank_write_the_same_graph(form, tokens, megabytes):
    """Also where the last rank holds fewer tokens, or none."""
    options = {"gather_outputs_megabytes": megabytes}
    first, first_tokens = graph_of(0, tokens, form, **options)
    last, last_tokens = graph_of(RANKS - 1, tokens, form, **options)
    assert (first_tokens == last_tokens) == (tokens % RANKS == 0)
    assert first.count("= cp.ring_attention(") == 2
    assert first == last


def test_mean_loss_of_a_sharded_sequence_that_does_not_divide(mesh):
    """DTensor refuses it, but what Dynamo asks it for is only a shape."""

    def loss(x, labels):
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())

    x, labels = torch.randn(2, 30, 8), torch.randint(8, (2, 30))
    captured = capture(loss, cp.shard(x, mesh, 1), cp.shard(labels, mesh, 1))
    assert "= cp_loss(cross_entropy, " in captured.text


def test_two_runs_write_the_same_graph(mesh):
    ids = torch.zeros(2, 16, dtype=torch.long)
    texts = [
        capture(small_gpt(), ids, mesh=mesh, shard={"tokens": 1}).text for _ in range(2)
    ]
    assert texts[0] == texts[1]


def test_the_order_is_the_documented_one():
    assert [run.__name__ for run in MODEL] == NAMES


def test_every_pass_is_counted(mesh):
    counters.clear()
    ids = torch.zeros(2, 16, dtype=torch.long)
    options = {"mesh": mesh, "shard": {"tokens": 1}, "inner": "aot_eager"}
    options |= {"strategy": "ring", "layout": "zigzag"}
    compiled = torch.compile(small_gpt(), backend="cp", options=options)
    explanation = cp.explain(compiled, ids)
    (graph,) = explanation.graphs
    assert [run.name for run in graph.passes] == NAMES
    counts = {run.name: run.rewrites for run in graph.passes}
    kept = {"relayouts_cancelled": 8, "relayouts_left": 0}
    kept |= {"sink_slices": 0, "tile_tokens": 0}
    kept |= {"save_before_writes": 0, "record_mixers": 0}
    assert counts | kept == counters["cpcompile"]
    assert counts["shard_graph"] == graph.distributed_calls > 20
    del counts["shard_graph"]
    rewrites = {
        "find_attention": 2,
        "choose_strategy": 2,
        "insert_attention": 2,
        "lay_out_tokens": 2,
    }
    assert {name: count for name, count in counts.items() if count} == rewrites


def flat(x):
    """DTensor cannot flatten 13 tokens on 8 ranks in this order."""
    return x.transpose(0, 1).reshape(-1, 8).relu()


def text_of_plain_inputs(mesh):
    return capture(lambda x: flat(x), torch.randn(2, 13, 8), mesh=mesh, shard={"x": 1})


def test_answers_are_forgotten_when_the_backend_is_called(mesh):
    alone = text_of_plain_inputs(mesh)
    assert "cp_replicated(reshape, " in alone.text
    forget()
    sharded = capture(lambda x: flat(x), cp.shard(torch.randn(2, 13, 8), mesh, 1))
    assert "cp_replicated(reshape, " in sharded.text
    assert text_of_plain_inputs(mesh).text == alone.text
