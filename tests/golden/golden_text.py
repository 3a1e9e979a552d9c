"""What goldens look like: the one way in which a graph is printed and compared."""

from __future__ import annotations

import operator
import re
from textwrap import TextWrapper

import torch
import torch.fx as fx
from expecttest import assert_expected_inline

from cpcompile.passes.graph.nodes import fake_value
from cpcompile.passes.graph.readable import readable

WIDTH = 88  # that of all code
LOCAL_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.detach.default)
# What is not broken: the comment, where='a text', [2, 16] and (2, 16).
_UNBROKEN = re.compile(r"  # .*|='[^']*'|\[[^\[\]]{,60}\]|(?<=[ (])\([^()]{,60}\)")


def golden_text(graph: fx.Graph) -> str:
    """The graph, one node a line; process groups are named after what they are for.

    In graphs after autograd, whose lines have no shapes, `view`, `detach` and parts of
    tuples have no lines of their own.
    """
    return _one_spelling(_named_groups(readable(graph, _says_nothing)))


def assert_golden(text: str, expected: str) -> None:
    """Compare, with lines that are too long broken between their arguments."""
    lines = (_broken(line) for line in text.splitlines())
    assert_expected_inline("\n".join(lines), expected, skip=1)


def lines_with(text: str, *words: str) -> str:
    """The lines in which one of `words` occurs."""
    return "\n".join(x for x in text.splitlines() if any(w in x for w in words))


def lines_without(text: str, *words: str) -> str:
    """The lines in which none of `words` occurs."""
    return "\n".join(x for x in text.splitlines() if not any(w in x for w in words))


def renumbered(text: str, base: str) -> str:
    """With names that begin so numbered in their order, whatever stands between.

    A name with "_unsafe" in front counts as one without.
    """
    text = re.sub(rf"\b_unsafe_{base}\(", f"{base}(", text)
    names = re.findall(rf"\b(?:_unsafe_)?{base}(?:_\d+)?\b(?!\()", text)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}

    def new(found: re.Match[str]) -> str:
        number = numbers[found[0]]
        return f"{base}_{number}" if number else base

    return re.sub(rf"\b(?:_unsafe_)?{base}(?:_\d+)?\b(?!\()", new, text)


def bare_calls(text: str) -> str:
    """The lines without inputs and shapes."""
    lines = (x.split("  # ")[0] for x in text.splitlines())
    return "\n".join(x for x in lines if not x.endswith(" = input"))


def _says_nothing(node: fx.Node) -> bool:
    is_part = node.target is operator.getitem and isinstance(node.args[1], int)
    return fake_value(node) is None and (is_part or node.target in LOCAL_VIEWS)


def _named_groups(text: str) -> str:
    """Groups have names that depend on those made before."""
    text = re.sub(
        r"\b(ulysses|ring)_group='[^']*'",
        lambda found: f"{found[1]}_group={found[1].upper()}",
        text,
    )
    users = re.findall(r"= cp\.([a-z]+).*\bgroup='([^']*)'", text)
    names = {name: operator.upper() for operator, name in users}
    assert len(set(names.values())) == len(names), "several groups for one purpose"
    if len(names) == 1:
        names = dict.fromkeys(names, "GROUP")
    return re.sub(r"\bgroup='([^']*)'", lambda found: f"group={names[found[1]]}", text)


def _one_spelling(text: str) -> str:
    """x.mT is a call in Dynamo's graphs since torch 2.15, and has another name."""
    spelled = re.findall(r"(\w+) = (?:getattr\((\w+), 'mT'\)|mT\((\w+)\))", text)
    for number, (name, *_) in enumerate(spelled):
        new = f"mT_{number}" if number else "mT"
        text = re.sub(rf"\b{name}\b(?!\()", new, text)
    return re.sub(r"\bgetattr\((\w+), 'mT'\)", r"mT(\1)", text)


def _broken(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    wrapper = TextWrapper(
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    kept = _UNBROKEN.sub(lambda found: found[0].replace(" ", "\0"), line)
    return wrapper.fill(kept).replace("\0", " ")
