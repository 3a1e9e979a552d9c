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


@pytest.mark.parametrize("world", [1, 0, True, 2.0])
def test_less_than_two_ranks(world):
    assert f"got world={world!r}; needed at least 2 ranks" in refused(X, world=world)


def test_no_module():
    assert "got function as the model" in refused(X, model=lambda x: x)


def test_no_input():
    assert "needed the arguments of one call" in refused()


def test_a_number_of_steps():
    assert "got steps=0; needed a number of at least 1" in refused(X, steps=0)


def test_an_unknown_option():
    text = refused(X, options={"strateg": "ring"}, error=OptionError)
    assert "did you mean 'strategy'" in text


def test_gradients_that_are_shares():
    assert "needed complete ones" in refused(X, options={"grad_sync": "none"})


def test_a_model_that_does_not_run_in_float64():
    class Model(nn.Module):
        def forward(self, x):
            if x.dtype is torch.float64:
                raise NotImplementedError("no kernel for Double")
            return x.sum()

    text = refused(X, model=Model())
    assert "Model does not run on one process" in text
    assert "NotImplementedError: no kernel for Double" in text


def test_two_axes_need_a_group():
    text = refused(X, options={"axis": ("ring", "ulysses")})
    assert "needed a mesh with both, in a process group that runs" in text


def test_what_cannot_be_pickled():
    class Local(nn.Module):
        def forward(self, x):
            return x.sum()

    text = refused(X, model=Local())
    assert "cannot be pickled" in text and "Local" in text
    assert "class stands at the top of a module" in text


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
