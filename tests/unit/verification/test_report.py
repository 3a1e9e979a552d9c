"""The report of a verification, as people and programs read it."""

import dataclasses
import json
import math
import re

from expecttest import assert_expected_inline

from cpcompile.apps.verification.differences import CallPlace, Check
from cpcompile.apps.verification.verification_report import Report
from cpcompile.apps.verification.verify import _advice

RIGHT = (
    Check("result", "logits", 6.3e-7, 3.8e-6, 0),
    Check("loss", "step 1", 1.3e-7, 3.6e-6, 1),
    Check("gradient", "head.bias", 8.5e-9, 3.5e-8, 0),
    Check("gradient", "head.weight", 0.0, 1e-8, 0),
)
WRONG = Check("gradient", "head.bias", 0.052, 5.3e-8, 1)
MISSING = Check("weight", "norm.bias", 0.0, 0.0, 0, "missing")
NONE = Check("result", "hidden", math.nan, 1e-6, 1)
FIRST = CallPlace(
    what="the gradient",
    call="parameter head.bias",
    node="l_bias_",
    written="an input of the graph, full on every rank",
    read_by=("linear",),
    path="head",
    line="model.py:55: logits = self.head(x)",
    error=0.052,
    bound=1.1e-14,
    rank=1,
    dtype="float64",
)


def report(*checks, **rest):
    return Report("Model", 4, "inner='aot_eager'", 2, checks, ("forward: ...",), **rest)


def test_all_is_right():
    found = report(*RIGHT)
    assert found.ok and found.exit_code == 0 and not found.wrong()
    assert_expected_inline(
        str(found),
        """\
Model on 4 ranks equals one process (inner='aot_eager')

  compared   tensors  wrong  largest error  allowed  tensor
  results          1      0  6.3e-07        3.8e-06  logits
  losses           1      0  1.3e-07        3.6e-06  step 1
  gradients        2      0  8.5e-09        3.5e-08  head.bias

forward: ...""",
    )


def test_something_differs():
    found = report(*RIGHT[:2], WRONG, MISSING, NONE, first=FIRST, advice=("this",))
    assert not found.ok and found.exit_code == 1
    assert_expected_inline(
        str(found),
        """\
Model on 4 ranks DIFFERS from one process (inner='aot_eager')

  compared               tensors  wrong  largest error  allowed  tensor
  results                      2      1  nan            1e-06    hidden
  losses                       1      0  1.3e-07        3.6e-06  step 1
  gradients                    1      1  0.052          5.3e-08  head.bias
  weights after 2 steps        1      1  0              0        norm.bias

what differs, the worst first:
  what      tensor     error  allowed  rank
  weight    norm.bias  0      0           0  missing
  result    hidden     nan    1e-06       1
  gradient  head.bias  0.052  5.3e-08     1

first difference: the gradient of parameter head.bias (node l_bias_)
  module   head
  line     model.py:55: logits = self.head(x)
  error    0.052, allowed 1.1e-14, on rank 1, in float64
  runs as  an input of the graph, full on every rank
  made by  the backward of linear

try: this

forward: ...""",
    )


def test_json_has_all_of_it_and_no_number_that_is_none():
    found = json.loads(report(WRONG, NONE, first=FIRST).to_json())
    assert found["ok"] is False and found["world"] == 4
    assert found["checks"][0]["name"] == "head.bias" and found["checks"][0]["rank"] == 1
    assert found["checks"][1]["error"] == "nan"
    assert found["first"]["line"] == FIRST.line and found["first"]["node"] == "l_bias_"


def test_nan_and_missing_are_wrong_and_come_first():
    assert not NONE.ok and not MISSING.ok
    assert report(WRONG, NONE).wrong() == [NONE, WRONG]


def test_what_to_try():
    """By what differs, without what was tried."""
    assert _advice(list(RIGHT), None, {}) == ()
    compilers = ["inner", "unroll", "fold_repeated_blocks"]
    for options, names in (
        ({}, [*compilers, "layout"]),
        ({"layout": "contiguous"}, compilers),
        ({"inner": "aot_eager"}, ["layout"]),
    ):
        *found, report_it = _advice([WRONG], None, options)
        assert [re.search(r"(?:\['|config\.)(\w+)", x)[1] for x in found] == names
        assert "a report of this" in report_it
    (strategy, *_) = _advice([WRONG], dataclasses.replace(FIRST, call="attention"), {})
    assert strategy.startswith("options['strategy'] = 'all_gather'")
