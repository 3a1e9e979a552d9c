"""What operators say to a softcap, dropout and sinks that they do not take."""

import pytest
import torch

from tests.support.attention_calls import attention

Q = torch.randn(2, 4, 5, 8)
SEEDS = torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"softcap": -1.0}, "softcap -1.0, needed it positive, or 0 for none"),
        ({"dropout_p": 1.0, "seeds": SEEDS}, "dropout_p 1.0, needed it in [0, 1)"),
        ({"dropout_p": 0.5}, "seeds None, needed (2, 4)"),
        ({"dropout_p": 0.5, "seeds": SEEDS[:1]}, "seeds (1, 4), needed (2, 4)"),
        ({"seeds": SEEDS}, "seeds (2, 4), needed none without dropout"),
        (
            {"sinks": torch.zeros(3)},
            "attention of 4 heads: got sinks (3,); needed [4], one number per head",
        ),
    ],
    ids=str,
)
def test_bad_arguments(given, text):
    with pytest.raises(ValueError) as caught:
        attention("local")(Q, Q, Q, 0.5, **given)
    assert text in str(caught.value)


def test_right_arguments_pass():
    changes = {"softcap": 2.0, "dropout_p": 0.5, "seeds": SEEDS}
    out, lse = attention("local")(Q, Q, Q, 0.5, sinks=torch.zeros(4), **changes)
    assert out.isfinite().all() and lse.isfinite().all()
