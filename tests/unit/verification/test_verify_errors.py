"""What cp.verify and `cpcompile verify` say to bad input, before any process starts."""

import sys

import pytest
import torch
import torch.nn as nn

import cpcompile as cp
from cpcompile.apps.cli.main import main
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
