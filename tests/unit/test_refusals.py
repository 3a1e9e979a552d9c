"""Which errors are refusals, and what becomes of the others."""

import logging

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from cpcompile import logs, refusals
from cpcompile.errors import RewriteError
from cpcompile.passes.flow.flow import EntriesMeet
from cpcompile.refusals import check_refusal, is_refusal


def raised_by(function):
    with pytest.raises(Exception) as caught:  # whatever it raises
        function()
    return caught.value


def in_cpcompile(lines):
    """A function of these lines, as if it stood in a file of cpcompile."""
    names = {"__name__": "cpcompile.passes.made_up", "torch": torch}
    exec("def function():\n" + "".join(f"    {x}\n" for x in lines), names)
    return names["function"]


def mesh():
    return DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)


def renormed():
    x = DTensor.from_local(torch.ones(4), mesh(), [Replicate()], run_check=False)
    return torch.renorm(x.view(2, 2), 1, 0, 5)


def raising(error):
    def refuse():
        raise error

    return refuse


@pytest.mark.parametrize(
    "function",
    [
        *map(raising, (EntriesMeet(), RewriteError("no"), NotImplementedError("no"))),
        # of other code
        *map(raising, (ValueError("einops"), TypeError("x"), AssertionError("y"))),
        in_cpcompile(["torch.ones(2) @ torch.ones(3)"]),  # by the C++ of torch
        renormed,  # by a rule of DTensor
    ],
)
def test_what_says_no_is_a_refusal(function):
    assert is_refusal(raised_by(function))


@pytest.mark.parametrize(
    "line",
    [
        "torch.ones(2).no_such_method()",
        "no_such_name",
        "torch.ones(2, no_such_argument=3)",
        "{}['no such key']",
        "[][0]",
        "assert False, 'a shard has a dimension'",
        "a, b = 1, 2, 3",
        "raise ValueError('a number of tokens')",
    ],
)
def test_what_a_line_of_ours_raises_is_a_mistake(line):
    assert not is_refusal(raised_by(in_cpcompile([line])))
    # torch is given a name for a mesh, and notices it in a line of its own.
    error = raised_by(lambda: DTensor.from_local(torch.ones(4), "mesh", [Replicate()]))
    assert type(error) is AttributeError and not is_refusal(error)


@pytest.fixture
def released(monkeypatch):
    """As for users: mistakes have their fallback."""
    monkeypatch.setattr(refusals, "raises_mistakes", False)
    logs.warn_once.cache_clear()
    before = counters["cpcompile"][refusals.COUNTER]
    yield lambda: counters["cpcompile"][refusals.COUNTER] - before
    counters["cpcompile"][refusals.COUNTER] = before
    logs.warn_once.cache_clear()


def test_a_mistake_is_counted_and_logged_once(released, caplog):
    function = in_cpcompile(["no_such_name"])
    with caplog.at_level(logging.WARNING, "cpcompile"):
        check_refusal(EntriesMeet(), "the trial of mul")  # a refusal is neither
        assert released() == 0 and caplog.records == []
        for _ in range(3):
            check_refusal(raised_by(function), "the trial of mul")
    assert released() == 3
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("the trial of mul failed by a mistake in cpcompile")
    assert "Traceback" in text
    assert "NameError: name 'no_such_name' is not defined" in text


def test_the_tests_raise_mistakes():
    with pytest.raises(NameError):
        check_refusal(raised_by(in_cpcompile(["no_such_name"])), "the trial of mul")
    counters["cpcompile"][refusals.COUNTER] -= 1
