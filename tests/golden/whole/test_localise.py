"""The joint graph of the whole sequence becomes that of one rank."""

import json
import re

import torch
import torch.nn as nn
import torch.nn.functional as F

from cpcompile import logs
from tests.golden.capture import localised, warnings
from tests.golden.golden_text import assert_golden, lines_with

MESH_AXES = {"cp": 4}
SHARD = {"x": 1}


def test_a_model_and_its_loss(mesh):
    """Ids are whole, and their parts are read; ranks add losses and gradients."""
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))

    def loss(ids, labels):
        return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())

    ids = torch.zeros(2, 10, dtype=torch.long)
    shard = {"ids": 1, "labels": 1}
    text = localised(loss, ids, ids.clone(), shard=shard, mesh=mesh).text
    assert_golden(
        lines_with(text, "= aten.split", "= aten.embedding(", "all_reduce("),
        """\
split = aten.split.Tensor(primals_2, split_size=3, dim=1)
split_1 = aten.split.Tensor(primals_4, split_size=3, dim=1)
embedding_1 = aten.embedding(primals_1, clone)
all_reduce = _c10d_functional.all_reduce(div_2, reduce_op='sum', group_name='0')
all_reduce_1 = _c10d_functional.all_reduce(embedding_dense_backward_1, reduce_op='sum',
    group_name='0')
all_reduce_2 = _c10d_functional.all_reduce(t_6, reduce_op='sum', group_name='0')""",
    )


def test_rows_of_heads_and_products_of_a_batch_stay_apart(mesh):
    """Of 3, 3, 3 and 1 tokens; keys are not copied for each of them."""

    def scores(x, keys):
        q = (x * weight).view(-1, 4).softmax(-1).view(2, 10, 2, 4)
        return (q @ keys[:, None].mT).square().sum()

    weight, keys = nn.Parameter(torch.randn(8)), torch.randn(2, 5, 4)
    text = localised(
        scores, torch.randn(2, 10, 8), keys, shard={"x": 1}, mesh=mesh
    ).text
    assert "_softmax_1 = aten._softmax(view_9, dim=3, half_to_float=False)" in text
    assert "bmm_2 = aten.bmm(view_11, view_12)" in text and "all_gather" not in text


def test_a_shift_sends_the_tokens_at_borders(mesh):
    linear, x = nn.Linear(8, 8), torch.randn(2, 12, 8)
    text = localised(
        lambda x: linear(x)[:, 1:].square().sum(), x, shard={"x": 1}, mesh=mesh
    ).text
    assert_golden(
        lines_with(text, "moved_tokens"),
        """\
moved_tokens = cp.moved_tokens([view_7], dim=1, lengths=[12],
    layouts='contiguous contiguous', pieces=[0, 1, 11, 0, 1, 1], length=11, fill=0,
    group='0')
view_8 = aten.view(moved_tokens, size=[2, 3, 8])
moved_tokens_1 = cp.moved_tokens([mul_3], dim=1, lengths=[11],
    layouts='contiguous contiguous', pieces=[-1, 0, 12, 0, 1, 1, 0, 0, 11, 1, 1, 1],
    length=12, fill=0, group='0')
view_9 = aten.view(moved_tokens_1, size=[2, 3, 8])""",
    )
    assert "all_gather" not in text


def test_chunks_of_rows_and_the_last_token(mesh):
    """Each rank has its share of a chunk; the token is a sum of what ranks have."""

    def loss(x):
        rows = linear(x).flatten(0, 1).split(8)
        y = torch.cat([linear(part).softmax(-1) for part in rows]).view(2, 12, 8)
        return y.mul(x).sum() + linear(y)[:, -1].cos().sum()

    linear, x = nn.Linear(8, 8, bias=False), torch.randn(2, 12, 8)
    text = localised(loss, x, mesh=mesh, shard=SHARD).text
    assert re.findall(r"layouts='(.*?)'", text)[:4] == [
        "contiguous*2 contiguous"
    ] * 3 + [" ".join(["contiguous"] * 4)]
    assert "all_gather" not in text


def test_what_fails_on_another_rank_is_gathered_here_too(mesh, monkeypatch, caplog):
    """Here nothing fails; the other rank's second answer is ours."""
    logs.warn_once.cache_clear()
    reason = "aten.sin.default at <top level>: it gives [2, 3, 8] of [2, 10, 8]"
    answers = iter([{"sin": reason}])

    def other(text):
        return [text, json.dumps(next(answers, json.loads(text)))]

    monkeypatch.setattr(
        "cpcompile.compile.attempts.all_gather_text",
        lambda group, text, doing: other(text),
    )
    x, weight = torch.randn(2, 10, 8), nn.Parameter(torch.randn(8))
    text = localised(
        lambda x: (x * weight).sin().sum(1), x, shard={"x": 1}, mesh=mesh
    ).text
    assert_golden(
        lines_with(text, "all_gather_into_tensor(", "sin(", "cos("),
        """\
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor(mul_6, group_size=4,
    group_name='0')
sin_2 = aten.sin(clone_3)
cos_2 = aten.cos(mul_6)""",
    )
    assert f"sin runs on gathered tensors, because {reason}" in warnings(caplog)
