"""All passes together: every rank sends the same, and every pass is counted."""

import re
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import cpcompile as cp
from cpcompile.passes.pipeline import JOINT, MODEL, WHOLE
from tests.golden.capture import RANKS, fake_mesh, forget, localised
from tests.golden.golden_text import assert_golden, lines_with
from tests.models.families.small_gpt import SmallGPT

NAMES = [
    "inline_attention_modules",
    "number_rows",
    "join_parts",
    "decompose_flex_attention",
    "fold_attention_patterns",
    "find_attention",
    "find_windows",
    "fold_kv_repeat",
    "rewrite_masks",
    "fold_moe_dispatch",
    "find_latents",
    "choose_strategy",
    "insert_attention",
    "ask_policies",
    "pad_convolutions",
    "fold_scans",
    "split_pairs_by_rows",
    "exchange_mixers",
    "begin_tokens",
    "refuse_attention",
    "leave_for_later",
    "keep_programs",
    "keep_calls",
]
WHOLE_NAMES = ["keep_convolutions", "keep_rows", "keep_products", "localise"]


def small_gpt():
    torch.manual_seed(0)
    return SmallGPT(vocabulary=16, width=8, heads=2, context=64, checkpointed=(1,))


def messages(rank, tokens, form, **options):
    """The calls of one rank that communicate, and how many tokens that rank holds."""
    with fake_mesh(RANKS, rank=rank) as mesh:
        ids = torch.arange(2 * tokens).reshape(2, tokens) % 16
        part = cp.shard(ids, mesh, 1)
        inputs = (part, part)
        if form == "plain inputs":
            inputs = (ids, ids.clone())
            options |= {"mesh": mesh, "shard": {"tokens": 1, "labels": 1}}
        text = localised(small_gpt(), *inputs, strategy="ring", **options).text
        calls = re.findall(r" = ((?:cp|_c10d_functional)\.\w+)\(", text)
        return calls, part.to_local().shape[1]


@pytest.mark.parametrize("form", ["plain inputs", "sharded inputs"])
@pytest.mark.parametrize(("tokens", "megabytes"), [(32, inf), (30, 0), (5, inf)])
def test_first_and_last_rank_send_the_same(form, tokens, megabytes):
    """Also where the last rank holds fewer tokens, or none."""
    options = {"gather_outputs_megabytes": megabytes}
    first, first_tokens = messages(0, tokens, form, **options)
    last, last_tokens = messages(RANKS - 1, tokens, form, **options)
    assert (first_tokens == last_tokens) == (tokens % RANKS == 0)
    assert first.count("cp.ring_attention") == 2
    assert first == last


def test_mean_loss_of_a_sharded_sequence_that_does_not_divide(mesh):
    """Labels that count are those of all ranks, logits are not gathered."""

    def loss(x, labels):
        return F.cross_entropy(x.flatten(0, 1), labels.flatten())

    x, labels = torch.randn(2, 30, 8, requires_grad=True), torch.randint(8, (2, 30))
    text = localised(loss, cp.shard(x, mesh, 1), cp.shard(labels, mesh, 1)).text
    assert_golden(
        lines_with(text, "= _c10d", " div_2 ", "sum_3", "return"),
        """\
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor(primals_2,
    group_size=8, group_name='0')
wait_tensor = _c10d_functional.wait_tensor(all_gather_into_tensor)
sum_3 = aten.sum(ne_9)
_to_copy_1 = aten._to_copy(sum_3, dtype=torch.float32, device=cpu)
all_reduce = _c10d_functional.all_reduce(div_2, reduce_op='sum', group_name='0')
wait_tensor_1 = _c10d_functional.wait_tensor(all_reduce)
return [wait_tensor_1, view_10, None]""",
    )


def test_two_runs_write_the_same_graph(mesh):
    ids = torch.zeros(2, 16, dtype=torch.long)
    texts = []
    for _ in range(2):
        forget()
        texts.append(localised(small_gpt(), ids, mesh=mesh, shard={"tokens": 1}).text)
    assert texts[0] == texts[1]


def test_the_order_is_the_documented_one():
    assert [run.__name__ for run in MODEL] == NAMES
    assert [run.__name__ for run in WHOLE] == WHOLE_NAMES


def test_every_pass_is_counted(mesh):
    counters.clear()
    ids = torch.zeros(2, 16, dtype=torch.long)
    options = {"mesh": mesh, "shard": {"tokens": 1}, "inner": "aot_eager"}
    options |= {"strategy": "ring", "layout": "zigzag"}
    compiled = torch.compile(small_gpt(), backend="cp", options=options)
    explanation = cp.explain(compiled, ids)
    (graph,) = explanation.graphs
    assert [run.name for run in graph.passes] == NAMES
    counts = dict(counters["cpcompile"])
    assert counts.pop("localise") > graph.distributed_calls > 20
    others = {"relayouts_left", *(run.__name__ for run in JOINT)}
    assert counts.keys() == {*NAMES, *WHOLE_NAMES[:-1], *others, "relayouts_cancelled"}
    assert {name: count for name, count in counts.items() if count} == {
        "find_attention": 2,
        "choose_strategy": 2,
        "insert_attention": 2,
        "keep_products": 27,
        "relayouts_cancelled": 8,
    }
    assert {run.name: run.rewrites for run in graph.passes}.items() <= counts.items()


def flat(x):
    """DTensor cannot flatten 13 tokens on 8 ranks in this order."""
    return x.transpose(0, 1).reshape(-1, 8).relu()


def text_of_plain_inputs(mesh):
    x = torch.randn(2, 13, 8)
    return localised(lambda x: flat(x), x, mesh=mesh, shard={"x": 1}).text


def test_answers_are_forgotten_when_the_backend_is_called(mesh):
    alone = text_of_plain_inputs(mesh)
    assert alone.count("all_gather_into_tensor(") == 1
    forget()
    sharded = localised(lambda x: flat(x), cp.shard(torch.randn(2, 13, 8), mesh, 1))
    assert sharded.text.count("all_gather_into_tensor(") == 1
    assert text_of_plain_inputs(mesh) == alone
