"""What cpcompile uses of Inductor is there; where it is not, rings stay operators."""

import re
from textwrap import fill

import pytest
import torch
from expecttest import assert_expected_inline
from torch._inductor import config as inductor_config

from cpcompile.ops.step import lowering
from cpcompile.torch_patches import inductor_compat
from cpcompile.torch_patches.inductor_compat import PROBES, Probe, problems
from tests.cpu.attention_cases import AttentionCase, check_case
from tests.golden.capture import warnings
from tests.inductor.inductor_code import check_rings_are_operators, codes_of

BROKEN = Probe("torch._inductor.ir:TensorBox.kreate")


def test_each_symbol_is_probed_once():
    symbols = [probe.symbol for probe in PROBES]
    assert len(symbols) == len(set(symbols))
    assert all(re.fullmatch(r"torch\._inductor[\w.]*:[\w.]+", x) for x in symbols)


def test_nothing_is_missing():
    problems.cache_clear()
    assert problems() == ()  # every probe that has one is named


def in_lowering(name, parameters=()):
    return Probe(f"torch._inductor.lowering:{name}", parameters)


PROBLEMS = {
    "module": (
        Probe("torch._inductor.nowhere:TritonTemplate"),
        "TritonTemplate: No module named 'torch._inductor.nowhere'",
    ),
    "attribute": (
        BROKEN,
        "TensorBox.kreate: type object 'TensorBox' has no attribute 'kreate'",
    ),
    "path": (
        in_lowering("nothing.at_all"),
        "nothing.at_all: module 'torch._inductor.lowering' has no attribute 'nothing'",
    ),
    "parameters": (
        in_lowering("to_dtype", ("x", "hue", "dtype", "tint")),
        "to_dtype takes no hue, tint",
    ),
    "fine": (in_lowering("to_dtype", ("dtype", "x")), None),
    # Keywords of any name are no promise, and no lack either.
    "keywords": (in_lowering("full", ("size", "any_name")), None),
}


@pytest.mark.parametrize(("probe", "text"), PROBLEMS.values(), ids=PROBLEMS)
def test_problem(probe, text):
    module, _, _ = probe.symbol.partition(":")
    assert probe.problem() == (None if text is None else f"{module}:{text}")


@pytest.fixture
def broken(monkeypatch):
    """A torch in which one symbol has another name, before anything is registered."""
    registered = []
    monkeypatch.setattr(inductor_compat, "PROBES", (*PROBES, BROKEN))
    monkeypatch.setattr(lowering, "register", lambda: registered.append("all"))
    monkeypatch.setattr(
        inductor_compat, "register_lowering", lambda op, _: registered.append(op)
    )
    monkeypatch.setattr(
        inductor_compat, "make_template", lambda name, *_: registered.append(name)
    )
    problems.cache_clear()
    yield registered
    problems.cache_clear()


def test_problems_are_looked_for_once(broken, monkeypatch):
    assert problems() == (BROKEN.problem(),)
    monkeypatch.setattr(inductor_compat, "PROBES", ())
    assert problems() == (BROKEN.problem(),)


def test_rings_stay_operators(broken, caplog):
    check_rings_are_operators()
    assert broken == []
    (text,) = warnings(caplog)
    assert_expected_inline(
        fill(text.replace(torch.__version__, "VERSION"), 80),
        """\
torch VERSION has changed what cpcompile uses of Inductor:
torch._inductor.ir:TensorBox.kreate: type object 'TensorBox' has no attribute
'kreate'. Attention steps run as eager operators and rings are not unrolled:
correct, but messages and computation may overlap less""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_code_is_correct(broken, dtype):
    """A group of one rank computes all of it."""
    case = AttentionCase(world=1, seq=33, dtype=dtype)
    ((results, _),) = codes_of(1, case)
    check_case(case, results)
    assert broken == []


def test_a_pass_of_the_user_still_runs(broken):
    seen = []
    with inductor_config.patch(post_grad_custom_pre_pass=seen.append):
        codes_of(2, AttentionCase(seq=16))
    assert len(seen) == 2


def test_a_pass_of_the_user_runs_before_ours():
    problems.cache_clear()
    seen = []

    def note(graph):
        seen.append({str(node.target) for node in graph.nodes})

    with inductor_config.patch(post_grad_custom_pre_pass=note):
        ((_, codes),) = codes_of(2, AttentionCase(seq=16))
    forward, backward = seen
    assert "cp.ring_attention.default" in forward
    assert "cp.ring_attention_backward.default" in backward
    assert all("cp.ring_shift.default(" in code for code in codes)
    assert inductor_config.post_grad_custom_pre_pass is None
