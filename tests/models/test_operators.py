"""torch's own samples of its operators, one dimension cut over two ranks.

One case of each kind of operator stands in a list. `python -m tools.models operators`
runs all of them and writes docs/results/operators.json; of each operator of that record
the first sample is a case here, with every cut.
"""

import json

import pytest

from tests.models.operator_samples import BUGS, CutSample, SampleVerdict
from tools.models.operators import RECORD, answered, planned

# By what it guards; whether values may be gathered, as the record has it.
SHARED = [
    "abs/float64/0/x0.1",  # elementwise, and reductions in and beside the cut
    "addcdiv/float64/0/x1.0",
    "clamp/float64/0/x0.1,x1.1,x2.1",
    "var_mean/float64/0/x0.1",
    "max-reduction_with_dim/float64/0/x0.0",
    "dist/float64/0/x0.1,x1.1",
    "softmax/float64/0/x0.0",
    "cumsum/float64/0/x0.0",  # along the cut
    "cummax/float64/0/x0.0",
    "topk/float64/0/x0.2",
    "kthvalue/float64/0/x0.1",
    "bmm/float64/0/x0.2",  # products
    "matmul/float64/0/x0.0,x1.0",
    "nn.functional.linear/float64/0/x0.0",
    "flip/float64/0/x0.0",  # tokens that move
    "roll/float64/1/x0.0",
    "chunk/float64/0/x0.0",
    "narrow/float64/0/x0.0",
    "select/float64/0/x0.2",
    "diagonal/float64/0/x0.1",
    "nn.functional.pad-circular/float64/0/x0.2",
    "permute/float64/0/x0.1",
    "view_as_complex/float64/0/x0.0",
    "nn.functional.conv3d/float64/0/x0.3",  # windows
    "nn.functional.conv_transpose2d/float64/0/x0.2",
    "nn.functional.max_pool2d/float64/0/x0.2",
    "nn.functional.adaptive_avg_pool2d/float64/0/x0.3",
    "nn.functional.batch_norm/float64/0/x0.2",  # norms and losses
    "nn.functional.group_norm/float64/0/x0.2",
    "nn.functional.cross_entropy/float64/0/x0.0",
    "nn.functional.triplet_margin_loss/float64/0/x0.0,x1.0,x2.0",
    "nn.functional.scaled_dot_product_attention/float64/0/x0.1",
    "cholesky_solve/float64/3/x0.1,x1.1",  # whole matrices
    "qr/float64/0/x0.0",
]
GATHERED = ["quantile/float64/7/x0.0"]  # other operators by their first sample


@pytest.mark.parametrize("case", SHARED + GATHERED)
def test_a_sample_equals_one_process(pools, case):
    answer = answered(pools, CutSample.of(case))
    assert answer.verdict not in BUGS, f"{answer.call}: {answer.text}"
    if case in SHARED:
        assert answer.verdict is SampleVerdict.EXACT, f"{answer.call}: {answer.text}"


OPERATORS = [row["operator"] for row in json.loads(RECORD.read_text())["rows"]]


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_cut_of_a_first_sample_equals_one_process(pools, operator):
    bugs = []
    for case in planned([operator], [1]):
        if case.operator == operator:
            answer = answered(pools, case)
            if answer.verdict in BUGS:
                bugs.append(f"{case}: {answer.call}: {answer.text}")
    assert bugs == []
