"""What cp.verify and `cpcompile verify` say, of bad input and in reports."""

import dataclasses
import json
import math
import re
import sys

import pytest
import torch
import torch.nn as nn
from expecttest import assert_expected_inline

import cpcompile as cp
from cpcompile.apps.cli.main import main
from cpcompile.apps.verification.compare import Check
from cpcompile.apps.verification.module_outputs import described, place_of
from cpcompile.apps.verification.verification_report import Difference, Report
from cpcompile.apps.verification.verify import _advice
from cpcompile.errors import InputError, OptionError

X = torch.ones(1, 4, 8)


def refused(*args, error=InputError, model=None, **settings):
    with pytest.raises(error) as caught:
        cp.verify(model or nn.Linear(8, 8), *args, **settings)
    return str(caught.value)


class Local(nn.Module):
    def forward(self, x):
        if x.dtype is torch.float64:
            raise NotImplementedError("no kernel for Double")
        return x.sum()


def local():
    class Unnamed(Local):
        def forward(self, x):
            return x.sum()

    return Unnamed()


REFUSED = {
    **{repr(x): ({"world": x}, f"got world={x!r}; needed at least 2 ranks")
       for x in (1, 0, True, 2.0)},
    "no module": ({"model": len}, "got builtin_function_or_method as the model"),
    "steps": ({"steps": 0}, "got steps=0; needed a number of at least 1"),
    "shares of gradients": ({"options": {"grad_sync": "none"}}, "needed complete ones"),
    "two axes": ({"options": {"axis": ("ring", "ulysses")}},
                 "needed a mesh with both, in a process group that runs"),
    "no float64": ({"model": Local()}, "Local does not run on one process ... "
                   "NotImplementedError: no kernel for Double"),
    "not pickled": ({"model": local()}, "cannot be pickled ... Unnamed ... "
                    "class stands at the top of a module"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    given, texts = REFUSED[name]
    message = refused(X, **given)
    assert all(text in message for text in texts.split(" ... "))


def test_no_input_and_an_unknown_option():
    assert "needed the arguments of one call" in refused()
    text = refused(X, options={"strateg": "ring"}, error=OptionError)
    assert "did you mean 'strategy'" in text


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "made_up.py").write_text(
        "import torch\n"
        "def one(): return torch.nn.Linear(2, 2)\n"
        "def wrong(): return torch.nn.Linear(2, 2), 3\n"
    )
    (tmp_path / "broken.py").write_text("import not_there_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    sys.modules.pop("made_up", None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("made_up", "needed module:function"),
        ("nowhere:f", "there is no module 'nowhere'"),
        ("made_up:two", "has no function 'two'; it has one, wrong"),
        ("made_up:one", "made_up:one returned Linear; needed (model, inputs)"),
        ("made_up:wrong", "made_up:wrong returned (Linear, int); needed (model, "),
        ("broken:f", "No module named 'not_there_at_all'"),
    ],
)
def test_what_the_command_says(folder, capsys, given, said):
    assert main(["verify", given]) == 2
    error = capsys.readouterr().err
    assert error.startswith("cpcompile verify: ") and said in error
    assert error.count("\n") == 1


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
