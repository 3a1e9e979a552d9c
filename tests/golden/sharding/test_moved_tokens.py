"""Calls that move tokens: what is written for them, and what stays as it is."""

import pytest
import torch
import torch.nn.functional as F

from tests.golden.capture import body, capture, sharded
from tests.golden.golden_text import assert_golden, table
from tests.golden.laid_out import attend as attend_laid_out
from tests.golden.laid_out import laid_out
from tests.golden.operands import attend


def moves(captured) -> str:
    """The calls that move or pick tokens, and what gathers."""
    words = ("cp_move_tokens", "cp_pick", "cp_gather_at", "cp_replicated", "cp_split")
    lines = [x for x in body(captured).splitlines() if any(w in x for w in words)]
    return "\n".join(
        x for x in lines if " = " in x and any(f"= {w}" in x for w in words)
    )


def test_a_loss_of_shifted_logits(mesh):
    """Labels are cut as the logits are; nothing is gathered."""

    def shifted(x, labels):
        logits = attend(x, 2)[:, :-1]
        return F.cross_entropy(logits.reshape(-1, 8), labels[:, 1:].reshape(-1))

    labels = torch.randint(8, (2, 40))
    captured = sharded(shifted, mesh, 2, 40, 8, more=(labels,))
    text = body(captured)
    assert_golden(
        text[text.index("cp_move_tokens =") :],
        """\
cp_move_tokens = cp_move_tokens([flatten], 1, 'slice', None, -1, None)
reshape = .reshape(cp_move_tokens, -1, 8)
getitem_1 = l_labels_[:, 1:]
reshape_1 = .reshape(getitem_1, -1)
cp_place = cp_place(reshape_1, (_S(0, 2),))
cp_loss = cp_loss(cross_entropy, reshape, cp_place, reshape_1, 'mean',
    ignore_index=-100, label_smoothing=0)
cp_gather = cp_gather(cp_loss)
return (cp_gather,)""",
    )


def test_a_slice_of_all_tokens(mesh):
    """It would cut nothing, and its gradient would be gathered."""
    captured = sharded(lambda x: attend(x, 2)[:, -40:, 2:].sin(), mesh, 2, 40, 8)
    assert "= flatten[:, :, 2:]" in captured.text
    captured = sharded(lambda x: attend(x, 2)[:, -40:].sin(), mesh, 2, 40, 8)
    assert "sin(flatten)" in captured.lines("sin")


KINDS = {
    "narrow": lambda x: x.narrow(1, 3, 30),
    "roll": lambda x: x.roll((1, 2), (1, 2)),
    "flip": lambda x: x.flip(1, 2),
    "pad": lambda x: F.pad(x, (1, 0, 3, 0), value=0.5),
    "difference": lambda x: x.diff(dim=1),
    "split": lambda x: torch.cat([x.split([10, 30], 1)[1], x], 1),
    "index": lambda x: x[:, 3:, None, 2:].squeeze(2),
}


def moved(calls, mesh):
    """The moves that each of the calls becomes."""
    return table(
        {
            name: moves(sharded(lambda x: call(attend(x, 2)).sin(), mesh, 2, 40, 8))  # noqa: B023
            for name, call in calls.items()
        }
    )


def test_every_kind(mesh):
    assert_golden(
        moved(KINDS, mesh),
        """\
narrow: cp_move_tokens = cp_move_tokens([flatten], 1, 'slice', 3, 33, None)
roll: cp_move_tokens = cp_move_tokens([flatten], 1, 'roll', 1)
flip: cp_move_tokens = cp_move_tokens([flatten], 1, 'flip')
pad: cp_move_tokens = cp_move_tokens([flatten], 1, 'pad', 3, 0, 'constant', fill=0.5)
difference:
  cp_move_tokens = cp_move_tokens([flatten], 1, 'slice', 1, None, 1)
  cp_move_tokens_1 = cp_move_tokens([flatten], 1, 'slice', None, -1, 1)
split:
  split = cp_split_tokens(flatten, 1, [10, 30])
  cp_move_tokens = cp_move_tokens([split[1], flatten], 1, 'cat')
index:
  cp_move_tokens = cp_move_tokens([flatten], 1, 'slice', 3, None, None)
  getitem = cp_move_tokens[:, :, None, 2:]""",
    )


PICKS = {
    "one": lambda x: x[:, -1],
    "few": lambda x: x[:, :2],
    "chosen": lambda x: x[:, torch.tensor([0, 3, 7])],
    "of each row": lambda x: x[torch.arange(2), torch.tensor([4, 5])],
    "index_select": lambda x: x.index_select(1, torch.tensor([1, 2])),
    "gather": lambda x: x.gather(1, torch.ones(2, 3, 8, dtype=torch.int64)),
}


def test_picks(mesh):
    assert_golden(
        moved(PICKS, mesh),
        """\
one: cp_pick_tokens = cp_pick_tokens(flatten, 1, (:, -1, :))
few: cp_pick_tokens = cp_pick_tokens(flatten, 1, (:, :2, :))
chosen: cp_pick_tokens = cp_pick_tokens(flatten, 1, (:, tensor, :))
of each row: cp_pick_tokens = cp_pick_tokens(flatten, 1, (arange, tensor, :))
index_select: cp_pick_tokens = cp_pick_tokens(flatten, 1, (:, tensor, :))
gather: cp_gather_at = cp_gather_at(flatten, 1, ones)""",
    )


STAY = {
    "channels": lambda x: x[..., 1:],
    "all tokens": lambda x: x[:, :],
    "rows of the batch": lambda x: x[:1],
    "a roll of channels": lambda x: x.roll(1, 2),
    "a concatenation of channels": lambda x: torch.cat([x, x], 2),
    # Many picks of one value are gathered once.
    "many picks": lambda x: torch.stack([x[:, i] for i in range(9)], 1),
}


@pytest.mark.parametrize("name", STAY)
def test_what_moves_no_token_stays(mesh, name):
    captured = sharded(lambda x: STAY[name](attend(x, 2)).sin(), mesh, 2, 40, 8)
    assert not moves(captured)


def test_what_is_not_sharded_stays(mesh):
    captured = capture(lambda x: x[:, 1:].sin(), torch.randn(2, 40, 8), mesh=mesh)
    assert not moves(captured)


def test_tokens_of_a_slice_stay_laid_out(mesh):
    """Both lengths are in zigzag, and no relayout is left."""

    def shifted(x):
        y = attend_laid_out(x)
        return (y[:, 1:] * y[:, :-1] * torch.linspace(0, 1, 31)[:, None]).sin().sum()

    captured = laid_out(shifted, mesh)
    assert "relayout" not in captured.text
    assert_golden(
        moves(captured),
        """\
cp_move_tokens = cp_move_tokens([y], 1, 'slice', 1, None, None, layout='zigzag')
cp_move_tokens_1 = cp_move_tokens([y], 1, 'slice', None, -1, None, layout='zigzag')""",
    )
