"""Losses of sharded values: no gather, and a count of all ranks."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import cpcompile as cp
from cpcompile.passes.graph.loss_calls import ELEMENTWISE
from tests.golden.capture import body, capture, changes, sharded, warnings
from tests.golden.golden_text import assert_golden
from tests.golden.operands import attend


def shifted_loss(x, labels):
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(x.flatten(0, 1), labels.flatten())


def test_cross_entropy_of_shifted_labels(mesh):
    labels = torch.randint(8, (2, 16))
    captured = sharded(shifted_loss, mesh, more=(labels,))
    assert_golden(
        body(captured),
        """\
cp_shard = cp_shard(l_x_, 1)
pad = pad(l_labels_, (0, 1), 'constant', -100)
labels = pad[:, 1:]
flatten = .flatten(cp_shard, 0, 1)
flatten_1 = .flatten(labels)
cp_place = cp_place(flatten_1, (_S(0, 2),))
cp_loss = cp_loss(cross_entropy, flatten, cp_place, flatten_1, 'mean',
    ignore_index=-100, label_smoothing=0)
cp_gather = cp_gather(cp_loss)
return (cp_gather,)""",
    )


def test_cross_entropy_of_sharded_inputs(mesh):
    x, labels = torch.randn(2, 16, 8), torch.randint(8, (2, 16))
    captured = capture(shifted_loss, cp.shard(x, mesh, 1), cp.shard(labels, mesh, 1))
    assert_golden(
        captured.lines("cp_loss", "cp_gather"),
        """\
cp_gather = cp_gather(cp_from_local)  # [2, 16]
pad = pad(cp_gather, (0, 1), 'constant', -100)  # [2, 17]
cp_loss = cp_loss(cross_entropy, flatten, cp_place, flatten_1, 'mean',
    ignore_index=-100, label_smoothing=0)  # [] P(sum)
cp_to_local = cp_to_local(cp_loss, (R,))  # []""",
    )


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_cross_entropy_with_all_arguments(mesh, reduction):
    def loss(x, labels, weight):
        return F.cross_entropy(
            x.transpose(1, 2),
            labels,
            weight=weight,
            ignore_index=3,
            reduction=reduction,
            label_smoothing=0.1,
        )

    more = (torch.randint(8, (2, 16)), torch.rand(8))
    captured = sharded(loss, mesh, more=more)
    wanted = (
        f", transpose, cp_place, None, '{reduction}', weight=l_weight_, "
        "ignore_index=3, label_smoothing=0.1)"
    )
    assert wanted in captured.text


TARGET = torch.rand(2, 15, 8)


def test_squared_error(mesh, caplog):
    """15 tokens on 8 ranks: the mean is a sum over 240."""
    captured = sharded(lambda x, t: F.mse_loss(x, t), mesh, 2, 15, 8, more=(TARGET,))
    assert "cp_loss(mse_loss, cp_shard, cp_place, None, 'mean')" in captured.text
    assert warnings(caplog) == []


@pytest.mark.parametrize("tokens", [15, 16])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_no_elementwise_loss_is_gathered(mesh, caplog, name, reduction, tokens):
    def loss(x, target):
        return ELEMENTWISE[name](x.sigmoid(), target, reduction=reduction)

    captured = sharded(loss, mesh, 2, tokens, 8, more=(torch.rand(2, tokens, 8),))
    (line,) = captured.lines(f"= cp_loss({name}, ").splitlines()
    assert f", sigmoid, cp_place, None, '{reduction}'" in line
    assert line.endswith("S(1)" if reduction == "none" else "# [] P(sum)")
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.MSELoss(), "cp_loss(mse_loss, x, cp_place, None, 'mean')"),
        (nn.L1Loss(reduction="sum"), "cp_loss(l1_loss, x, cp_place, None, 'sum')"),
        (nn.L1Loss(size_average=False), "cp_loss(l1_loss, x, cp_place, None, 'sum')"),
        (
            nn.HuberLoss(delta=0.5),
            "cp_loss(huber_loss, x, cp_place, None, 'mean', delta=0.5)",
        ),
        (
            nn.KLDivLoss(reduction="batchmean", log_target=True),
            "cp_loss(kl_div, x, cp_place, None, 'batchmean', log_target=True)",
        ),
    ],
    ids=lambda x: type(x).__name__,
)
def test_modules(mesh, module, text):
    captured = sharded(lambda x, t: module(x, t), mesh, more=(torch.rand(2, 16, 8),))
    assert text in captured.text.replace("cp_shard", "x")


def test_a_loss_of_torch_without_a_function_in_python(mesh):
    """Its reduction is a number."""

    def loss(x, target):
        return torch.ops.aten.mse_loss(x, target, 2), torch.kl_div(x, target, 1)

    captured = sharded(loss, mesh, more=(torch.rand(2, 16, 8),))
    assert "cp_loss(mse_loss, cp_shard, cp_place, None, 'sum')" in captured.text
    assert "cp_loss(kl_div, cp_shard, cp_place_1, None, 'mean'" in captured.text


def test_log_likelihood(mesh):
    def loss(x, labels, weight):
        scores = x.log_softmax(-1).flatten(0, 1)
        return F.nll_loss(scores, labels.flatten(), weight, ignore_index=2)

    more = (torch.randint(8, (2, 15)), torch.rand(8))
    captured = sharded(loss, mesh, 2, 15, 8, more=more)
    assert_golden(
        captured.lines("cp_"),
        """\
cp_shard = cp_shard(l_x_, 1)  # [2, 15, 8] S(1)
log_softmax = .log_softmax(cp_shard, -1)  # [2, 15, 8] S(1)
cp_place = cp_place(flatten_1, (_S(0, 2),))  # [30] _S(0, 2)
cp_loss = cp_loss(nll_loss, scores, cp_place, flatten_1, 'mean', weight=l_weight_,
    ignore_index=2)  # [] P(sum)
cp_gather = cp_gather(cp_loss)  # []
return (cp_gather,)""",
    )


def test_weights_are_placed_where_their_elements_are(mesh):
    def loss(x, target, weight, positive):
        return F.binary_cross_entropy_with_logits(
            x, target, weight, pos_weight=positive
        )

    more = (torch.rand(2, 16, 8), torch.rand(16, 1), torch.rand(8))
    captured = sharded(loss, mesh, more=more)
    assert_golden(
        captured.lines("cp_place", "cp_binary"),
        """\
cp_place = cp_place(l_target_, (S(1),))  # [2, 16, 8] S(1)
cp_place_1 = cp_place(l_weight_, (S(0),))  # [16, 1] S(0)
cp_place_2 = cp_place(l_positive_, (R,))  # [8] R
cp_loss = cp_loss(binary_cross_entropy_with_logits, cp_shard, cp_place, None, 'mean',
    weight=cp_place_1, pos_weight=cp_place_2)  # [] P(sum)""",
    )


OPERANDS = {
    # A target that is sharded is not placed again.
    "sharded": (lambda x, t: F.mse_loss(x.sin(), x.cos()), "(mse_loss, sin, cos, "),
    # The input is plain, and the target what the model gives.
    "reversed": (lambda x, t: F.l1_loss(t, x), "(l1_loss, cp_place, cp_shard, "),
    # A target that is broadcast is left to DTensor, and losses of plain values stay.
    "broadcast": (lambda x, t: F.mse_loss(x, t[0, :, :1]), None),
    "plain": (lambda x, t: (x.relu(), F.mse_loss(t, t.sin())), None),
    "plain labels": (
        lambda x, t: (x.relu(), F.cross_entropy(t[0], torch.arange(16) % 8)),
        None,
    ),
}


@pytest.mark.parametrize("case", OPERANDS)
def test_operands(mesh, case):
    loss, call = OPERANDS[case]
    captured = sharded(loss, mesh, more=(torch.rand(2, 16, 8),))
    if call is None:
        assert "cp_loss" not in captured.text
    else:
        assert f"cp_loss{call}None, 'mean')" in captured.text
        assert captured.text.count("= cp_place(") == call.count("cp_place")


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_loss_leaves_the_layout_alone(mesh, name):
    """Targets are cut as the tokens are, and nothing is gathered or relaid."""

    def model(x, target):
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        y = y.transpose(1, 2).flatten(2).sigmoid()
        return ELEMENTWISE[name](y, target)

    x, target = torch.rand(2, 64, 16), torch.rand(2, 64, 16)
    options = {"mesh": mesh, "shard": {"x": 1}, "layout": "zigzag"}
    captured = capture(model, x, target, **options)
    assert "zigzag scale=" in captured.text
    assert "cp_place(l_target_, (S(1),), 64, 'zigzag')" in captured.text
    assert captured.ctx.findings.relayouts == 0
    gathers = captured.lines("gather").splitlines()
    assert [x for x in gathers if "cp_gather(" in x] == gathers[:1]


WEIGHT = torch.randn(8, 11)


def loss(x, labels):
    logits = attend(x, 2) @ WEIGHT
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def unflattened(mesh, fn, rows):
    x, labels = torch.randn(3, 16, 8), torch.zeros(3, 16).long()
    if rows is not None:
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(labels, 0)
    shard = {"x": 1, "labels": 1}
    found = capture(
        fn, x, labels, mesh=mesh, shard=shard, dynamic=None, until="unflatten_losses"
    )
    return found["unflatten_losses"]


def test_a_loss_of_flattened_logits(mesh):
    step = unflattened(mesh, loss, "a symbol")
    assert step.rewrites == 1
    assert_golden(
        changes(step),
        """\
+ movedim = movedim(logits, -1, 1)
~ cross_entropy: flatten_1 -> movedim, flatten_2 -> l_labels_
- flatten, flatten""",
    )


def test_a_known_number_of_rows(mesh):
    """The twin."""
    step = unflattened(mesh, loss, None)
    assert step.rewrites == 0 and not step.changed


def test_logits_that_something_else_has_made(mesh):
    """No view of tokens: nothing to undo."""

    def flat(x, labels):
        logits = attend(x, 2).flatten(0, 1) @ WEIGHT
        return F.cross_entropy(logits, labels.flatten())

    step = unflattened(mesh, flat, "a symbol")
    assert step.rewrites == 0 and not step.changed
