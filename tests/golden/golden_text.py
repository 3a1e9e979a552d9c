"""What goldens look like: the one way in which a graph is printed and compared."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from textwrap import TextWrapper, indent
from typing import NamedTuple

import torch
import torch.fx as fx
from expecttest import assert_expected_inline

from cpcompile.passes.graph.nodes import fake_value
from cpcompile.passes.graph.readable import readable

WIDTH = 88  # that of all code
LOCAL_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.detach.default)
# What is not broken: the comment, where='a text', [2, 16] and (2, 16).
_UNBROKEN = re.compile(r"  # .*|='[^']*'|\[[^\[\]]{,60}\]|(?<=[ (])\([^()]{,60}\)")

_PART = re.compile(r"^ *(\w+) = (\w+\[\d+\])(?:\n|$)", re.MULTILINE)


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


def bare_calls(text: str) -> str:
    """The lines without inputs and shapes; parts of tuples have no lines either."""
    lines = (x.split("  # ")[0] for x in text.splitlines())
    text = "\n".join(x for x in lines if not x.endswith(" = input"))
    for part in _PART.finditer(text):
        if len(re.findall(rf"^ *{part[1]} = ", text, re.MULTILINE)) == 1:
            text = text.replace(part[0], "", 1)
            text = re.sub(rf"\b{part[1]}\b(?!\()", part[2], text)
    return text


def table(texts: Mapping[str, str]) -> str:
    """The texts of several cases, each behind or under its name."""
    return "\n".join(
        f"{name}: {text}" if text.count("\n") == 0 else f"{name}:\n{indent(text, '  ')}"
        for name, text in texts.items()
    )


def difference(before: str, after: str) -> str:
    """The calls that a pass wrote (+), gave other operands (~) and took away (-).

    Of the last ones only the functions are named, in their order.
    """
    old, new = (
        {call.name: call for call in map(_Call.of, text.splitlines())}
        for text in (before, after)
    )
    lines = []
    for name, call in new.items():
        was = old.get(name)
        if was is None or was.function != call.function:
            lines.append(f"+ {call.line}")
        elif was.operands != call.operands:
            lines.append(f"~ {name}: {_replaced(was.operands, call.operands)}")
    gone = [
        call.function
        for name, call in old.items()
        if name not in new or new[name].function != call.function
    ]
    return "\n".join([*lines, *([f"- {', '.join(gone)}"] if gone else [])])


class _Call(NamedTuple):
    """A line of a graph."""

    line: str
    name: str
    function: str
    operands: list[str]

    @staticmethod
    def of(line: str) -> _Call:
        name, _, right = line.strip().partition(" = ")
        if line.startswith("return "):
            name, right = "return", line.replace(" ", "", 1).replace(",)", ")")
        found = re.match(r"\.?([\w.]+)\((.*)\)$", right)
        if found is None:  # an index or an attribute
            return _Call(line, name, "getitem" if "[" in right else right, [right])
        return _Call(line, name, found[1], _split(found[2]))


def _split(operands: str) -> list[str]:
    """At the commas that are in no brackets and no texts."""
    parts, depth, is_text = [""], 0, False
    for letter in operands:
        is_text ^= letter == "'"
        depth += 0 if is_text else (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0 and not is_text:
            parts.append("")
        else:
            parts[-1] += letter
    return [x.strip() for x in parts]


def _replaced(old: list[str], new: list[str]) -> str:
    if len(old) != len(new):
        return f"({', '.join(old)}) -> ({', '.join(new)})"
    pairs = (f"{x} -> {y}" for x, y in zip(old, new, strict=True) if x != y)
    return ", ".join(dict.fromkeys(pairs))


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
