"""Tokens that are sorted by expert and brought back are one call; their twins stay."""

import pytest
import torch
import torch.nn.functional as F

from tests.cpu.routed_models import CHOSEN, EXPERTS, ROUTED, WIDTH, EveryExpert
from tests.golden.capture import capture, localised
from tests.golden.golden_text import assert_golden, lines_with

ROUTES = {"Routed": 2, "GroupedProduct": 2, "IndexAdd": 2, "ScatterAdd": 2, "Back": 2}
ROUTES |= {"Batched": 2, "Switch": 1, "Dense": 1, "Checkpointed": 2, "Unflattened": 1}
ROUTES |= {"Twice": 2, "TokensMeet": 1, "Capacity": 2, "UsedExperts": 2}
ROUTES |= {"WeightedCounts": 2, "CountedTwice": 3}


def captured(fn, mesh, *more):
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 16))
    return capture(fn, ids, *more, mesh=mesh, shard={"tokens": 1})


@pytest.mark.parametrize("name", ROUTED)
def test_how_many_regions_become_one_call(mesh, name):
    model = ROUTED[name]()
    found = captured(lambda tokens: model(tokens), mesh)
    assert found["fold_moe_dispatch"].rewrites == ROUTES[name]


def test_the_rewrite(mesh):
    model = ROUTED["Routed"]()
    found = captured(lambda tokens: model(tokens), mesh)
    words = ("topk", "ids", "sort", "rows", "rout", "getitem", "counts", "view")
    text = lines_with(found["fold_moe_dispatch"].after, *words)
    assert_golden(
        text.replace("l_model_parameters_", ""),
        """\
topk = .topk(probabilities, 2, dim=-1)
weights = topk[0]  # [32, 2]
ids = topk[1]  # [32, 2]
cp_row_parallel = cp_row_parallel(moe_dispatch, ids, flat, weights, up_, down_, bias_)
getitem_10 = cp_row_parallel[0]  # [32, 2, 32]
sum_1 = .sum(getitem_10, 1)  # [32, 32]
view_as = .view_as(sum_1, flatten)  # [2, 16, 32]
y_1 = add(flatten, view_as)  # [2, 16, 32]
cp_row_parallel_1 = cp_row_parallel(moe_dispatch, ids)
getitem_11 = cp_row_parallel_1[0]  # [4]
truediv = truediv(getitem_11, 64)  # [4]""",
    )


def test_a_rank_sorts_its_own_rows(mesh):
    """8 of 64; how many an expert gets is a sum over the ranks."""
    model, ids = ROUTED["Routed"](), torch.zeros(2, 16, dtype=torch.long)
    options = {"mesh": mesh, "shard": {"tokens": 1}}
    options |= {"strategy": "ring", "layout": "contiguous"}
    local = localised(model, ids, **options)
    assert "all_gather" not in local.text
    forward = local.text.partition("tangents_1, 0.1")[0]
    words = ("topk(", "sort(", "arange(", "aten.bmm(", "histc", "index_put(")
    assert_golden(
        lines_with(forward, *words),
        """\
topk_1 = aten.topk(_softmax_1, k=2)
sort = aten.sort(view_23)
bmm = aten.bmm(unsqueeze_2, index_1)
bmm_1 = aten.bmm(relu, index_2)
arange = aten.arange(end=8, device=cpu, pin_memory=False)
index_put = aten.index_put(empty_like, [getitem_28], arange)
histc = aten.histc(_to_copy, bins=4, max=4)
all_reduce = _c10d_functional.all_reduce(histc, reduce_op='sum', group_name='0')""",
    )


class Layer(torch.nn.Module):
    """Attention, and what `use` makes of its tokens and of their experts.

    use(layer, x, keys, order): keys are the experts in order, and order their sort.
    """

    def __init__(self, use, sort=lambda layer, ids: ids.flatten().sort()):
        super().__init__()
        self.base = ROUTED["Routed"]()
        self.use, self.sort = use, sort
        self.weight = torch.nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.register_buffer("table", torch.arange(EXPERTS).flip(0))

    def forward(self, tokens):
        x = self.base.linear(self.base.embedding(tokens))
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        x = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        x = x.transpose(1, 2).flatten(2).reshape(-1, WIDTH)
        ids = self.base.gate(x).topk(CHOSEN, dim=-1)[1]
        keys, order = self.sort(self, ids)
        return self.use(self, x, keys, order).view(-1, CHOSEN, WIDTH).sum()


def back(rows, order):
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return rows[inverse]


def ends(keys, low=0):
    counts = torch.histc(keys.float(), bins=EXPERTS, min=low, max=EXPERTS - 1)
    return counts.cumsum(0, dtype=torch.int32)


def product(layer, rows, where):
    weight = layer.weight.bfloat16()
    return F.grouped_mm(rows.bfloat16(), weight, offs=where).float()


def plain(layer, x, keys, order):
    return back(product(layer, x[order // CHOSEN], ends(keys)), order)


def sorted_rows_are_used(layer, x, keys, order):
    rows = x[order // CHOSEN]
    return back(rows, order) + rows


def added_where_others_are(layer, x, keys, order):
    rows = x[order // CHOSEN]
    places = order.unsqueeze(1).expand(-1, WIDTH)
    return torch.ones_like(rows).scatter(0, places, rows, reduce="add")


def neighbours_in_the_order(layer, x, keys, order):
    rows = x[order // CHOSEN].view(-1, CHOSEN, WIDTH).sum(1)
    return rows.repeat_interleave(CHOSEN, dim=0)


def written_while_it_is_read(layer, x, keys, order):
    x = x * 1
    rows = x[order // CHOSEN]
    x.add_(1)
    return back(rows + x.repeat_interleave(CHOSEN, dim=0)[order], order)


def another_inverse(layer, x, keys, order):
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0]).flip(0)
    return x[order // CHOSEN][inverse]


def of_rows(change):
    """Rows in the order of experts, changed, and brought back."""
    return lambda layer, x, keys, order: back(change(x[order // CHOSEN]), order)


def of_ends(find):
    """A product of each expert with its rows, which end where `find` says."""
    return lambda layer, x, keys, order: back(
        product(layer, x[order // CHOSEN], find(keys)), order
    )


# Experts of a table, as routers by hash have them; only data says which.
LOOKED_UP = (plain, lambda layer, ids: layer.table[ids].flatten().sort())
TWINS = {
    "another divisor": (lambda layer, x, keys, order: back(x[order // 4], order),),
    "descending": (plain, lambda layer, ids: ids.flatten().sort(descending=True)),
    "counted from one": (of_ends(lambda keys: ends(keys, low=1)),),
    "ends of another order": (
        plain,
        lambda layer, ids: (ids.flip(1).flatten().sort()[0], ids.flatten().sort()[1]),
    ),
    "sorted rows are used": (sorted_rows_are_used,),
    "normalised over tokens": (of_rows(lambda rows: rows - rows.mean(0)),),
    "random numbers": (of_rows(F.dropout),),
    "neighbours in the order": (neighbours_in_the_order,),
    "written while it is read": (written_while_it_is_read,),
    "another inverse": (another_inverse,),
    "divided as numbers": (
        lambda layer, x, keys, order: back(x[order.div(CHOSEN).long()], order),
    ),
    "keys of few bits": (of_ends(lambda keys: ends((keys * 100).to(torch.int8))),),
    "order of few bits": (
        lambda layer, x, keys, order: back(
            x[order.to(torch.int8).long() // CHOSEN], order
        ),
    ),
    "added where others are": (added_where_others_are,),
}


@pytest.mark.parametrize("given", [(plain,), LOOKED_UP], ids=["plain", "looked up"])
def test_what_the_twins_differ_from(mesh, given):
    """Numbers that only data tells are checked in the call."""
    layer = Layer(*given)
    found = captured(lambda tokens: layer(tokens), mesh)["fold_moe_dispatch"]
    assert found.rewrites == 1
    assert not lines_with(found.after, "# [64, 32]", "cp.expert_numbers")


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_stays(mesh, name):
    layer = Layer(*TWINS[name])
    found = captured(lambda tokens: layer(tokens), mesh)
    rows = "# [64, 32]"  # not inside of a call
    assert rows in found["fold_moe_dispatch"].after


def test_no_attention_of_repeated_padding(mesh):
    """Entries of a batch, repeated for every head, look like tokens for experts."""

    def attend(q, k, v, padding, bias):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        seen = padding.repeat_interleave(4, 0)
        bias = bias.masked_fill(~(seen[:, None, :] & seen[:, :, None]), -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return y.unflatten(0, (2, -1)).transpose(1, 2)

    torch.manual_seed(0)
    qkv = (torch.randn(2, 4, 16, 8) for _ in range(3))
    found = capture(
        *(attend, *qkv, torch.ones(2, 16, dtype=torch.bool), torch.randn(1, 16, 16)),
        mesh=mesh,
        shard={"q": 2, "k": 2, "v": 2},
    )
    assert found.error is None
    assert found["fold_moe_dispatch"].rewrites == 0
    assert len(found.ctx.findings.plans) == 1


def copied(mesh, layer):
    found = capture(layer, torch.randn(2, 16, WIDTH), mesh=mesh, shard={"x": 1})
    return found["fold_moe_dispatch"]


def test_tokens_that_every_expert_gets(mesh):
    """Llama 4 repeats all tokens for every expert, and adds up what experts make."""
    found = copied(mesh, EveryExpert())
    assert found.rewrites == 1
    assert_golden(
        lines_with(found.after, "row_parallel", "repeat", "bmm", "sigmoid"),
        """\
scores_1 = .sigmoid(scatter_)  # [32, 4]
cp_row_parallel = cp_row_parallel(moe_dispatch, rows, scores_1, l_self_parameters_up_,
    l_self_parameters_down_)
getitem_4 = cp_row_parallel[0]  # [32, 32]""",
    )


class TokensOfAnExpert(EveryExpert):
    """An expert weights the tokens by each other."""

    def between(self, made):
        return made.softmax(1)


class AnotherOrder(EveryExpert):
    """Scores of all experts for the first token, where rows are all tokens for one."""

    def flat(self, scores):
        return scores.reshape(-1, 1)


@pytest.mark.parametrize("twin", [TokensOfAnExpert, AnotherOrder])
def test_tokens_of_an_expert_that_meet(mesh, twin):
    found = copied(mesh, twin())
    assert found.rewrites == 0 and "repeat(" in found.after
