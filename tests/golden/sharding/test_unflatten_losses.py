"""Losses of flattened tokens, where the number of rows is a symbol."""

import torch
import torch.nn.functional as F

from tests.golden.capture import capture, changes
from tests.golden.golden_text import assert_golden
from tests.golden.operands import attend

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
