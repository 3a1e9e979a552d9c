"""Internal reasons in words of the user."""

import pytest

from cpcompile.passes.flow.reasons import in_words

TEXTS = {
    "NotImplementedError: Operator aten.renorm.default does not have a sharding "
    "strategy registered.": "DTensor has no sharding rule for aten.renorm",
    "its backward fails: AttributeError: 'FunctionalTensor' object has no attribute "
    "'_local_tensor'": (
        "its backward fails: plain tensors meet sharded ones inside of it"
    ),
    "RuntimeError: Attempting to use FunctionalTensor on its own. Instead, please use "
    "it with a corresponding": "plain tensors meet sharded ones inside of it",
    "RuntimeError: aten.add.Tensor got mixed torch.Tensor and DTensor, need to convert "
    "all": "plain tensors meet sharded ones inside of it, at aten.add",
    "RuntimeError: Attempted to flatten multiple dimensions, with dimension 1 being "
    "sharded.": (
        "it views a dimension as others that are split elsewhere, in uneven parts"
    ),
    "it would average the averages of the ranks": (
        "it would average the averages of the ranks"
    ),
}


@pytest.mark.parametrize("reason", TEXTS)
def test_reasons(reason):
    assert in_words(reason) == TEXTS[reason]
