"""The report of a verification, as people and programs read it."""

import dataclasses
import json
import math
import re

from expecttest import assert_expected_inline

from cpcompile.apps.verification.compare import Check
from cpcompile.apps.verification.module_outputs import described, place_of
from cpcompile.apps.verification.verification_report import Difference, Report
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
FIRST = Difference(
    kind="gradient",
    name="head.bias",
    error=0.052,
    bound=5.3e-08,
    rank=1,
    what="gradient of parameter bias",
    path="head",
    module="Linear",
    after="the loss step 1 of the model",
    dtype="float32",
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

first difference: the gradient of parameter bias of module head (Linear)
  error  0.052, allowed 5.3e-08, on rank 1, in float32
  after  the loss step 1 of the model, which is right

try: this

forward: ...""",
    )


def test_json_has_all_of_it_and_no_number_that_is_none():
    found = json.loads(report(WRONG, NONE, first=FIRST).to_json())
    assert found["ok"] is False and found["world"] == 4
    assert found["checks"][0]["name"] == "head.bias" and found["checks"][0]["rank"] == 1
    assert found["checks"][1]["error"] == "nan"
    assert found["first"]["path"] == "head" and found["first"]["name"] == "head.bias"


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
    attention = dataclasses.replace(FIRST, path="layers.0.self_attn.o_proj")
    (strategy, *_) = _advice([WRONG], attention, {})
    assert strategy.startswith("options['strategy'] = 'all_gather'")


def test_the_order_of_a_step():
    """Outputs as modules end; gradients the other way, those of parameters at last."""
    outputs = [f"{x}._cp_zeros_of_output_0" for x in ("embed", "block.a", "block")]
    made = [
        *(("forward", x) for x in outputs),
        ("result", "logits"),
        ("loss", "step 1"),
        ("backward", outputs[2]),
        ("backward", outputs[1]),
        ("gradient", "block.scale"),
        ("backward", outputs[0]),
        ("gradient", "embed.weight"),
        ("gradient", "of input ['x']"),
    ]
    assert sorted(set(made), key=lambda x: place_of(*x, outputs)) == made
    assert described("backward", outputs[1]) == ("block.a", "gradient of the output")
    assert described("gradient", "block.a.w") == ("block.a", "gradient of parameter w")
    assert described("gradient", "of input ['x.y']") == (
        "",
        "gradient of input ['x.y']",
    )
    assert described("result", "cache.0") == ("", "result cache.0")
