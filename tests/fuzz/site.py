"""Where a statement is written: names, lines, modules and inputs of its program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.fuzz.program import Setting, Statement


@dataclass(frozen=True)
class Kind:
    """A sort of statement.

    write: writes the lines of a statement; they assign `site.out`.
    choices: choice -> values, the simplest first; others are drawn alike often.
    operands: how many values it reads; the first is the one it stands for if left out.
    cross: whether the last operand may be of another length.
    weight: how often it is drawn, relative to the others.
    region: whether it has a body of statements.
    """

    write: Callable[[Site], None]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    operands: int = 1
    cross: bool = False
    weight: float = 1.0
    region: bool = False


@dataclass
class Value:
    """A variable [batch, tokens, width] and its number of tokens in every call."""

    text: str
    lengths: tuple[int, ...]


@dataclass
class Sheet:
    """The text of a program while it is written.

    inputs: name -> (the expression that makes it, its sequence dim or None).
    helpers: classes and functions in front of the model, each once.
    drawn: whether the program draws random numbers while it runs.
    kinds: who writes which statement.
    """

    setting: Setting
    kinds: Mapping[str, Kind]
    inputs: dict[str, tuple[str, int | None]] = field(default_factory=dict)
    helpers: list[str] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    drawn: bool = False
    count: int = 0

    def fresh(self, prefix: str) -> str:
        """A name that nothing else has."""
        self.count += 1
        return f"{prefix}{self.count}"

    def helper(self, text: str) -> None:
        """Put `text` in front of the model, once."""
        if text not in self.helpers:
            self.helpers.append(text)


@dataclass
class Scope:
    """One class: what __init__ and forward have.

    used: inputs that its forward reads.
    """

    init: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    used: dict[str, None] = field(default_factory=dict)
    depth: int = 0


class Site:
    """What the writer of a kind sees of the place where its statement stands."""

    def __init__(self, sheet: Sheet, scope: Scope, statement: Statement) -> None:
        self.sheet, self.scope, self.statement = sheet, scope, statement
        self.setting = sheet.setting
        self.width, self.heads = self.setting.width, self.setting.heads
        self.values = [sheet.values[name] for name in statement.operands]
        self.out = "v" + statement.name
        self.lengths = self.values[0].lengths if self.values else self.setting.lengths
        self._choices = dict(statement.choices)

    def __getitem__(self, choice: str) -> str:
        return self._choices[choice]

    @property
    def a(self) -> str:
        """The variable of the first operand."""
        return self.values[0].text

    @property
    def b(self) -> str:
        """The variable of the last operand."""
        return self.values[-1].text

    def number(self, place: int, below: int) -> int:
        """A drawn number, 0 to below - 1."""
        return self.statement.numbers[place % len(self.statement.numbers)] % below

    def line(self, text: str) -> None:
        """A line of forward."""
        self.scope.lines.append("    " * self.scope.depth + text)

    def let(self, expression: str, prefix: str = "t") -> str:
        """Assign a fresh variable."""
        name = self.sheet.fresh(prefix)
        self.line(f"{name} = {expression}")
        return name

    def returns(self, expression: str, lengths: tuple[int, ...] | None = None) -> None:
        """Assign the statement's value; None: the lengths of the first operand."""
        self.line(f"{self.out} = {expression}")
        if lengths is not None:
            self.lengths = lengths

    def module(self, expression: str) -> str:
        """A submodule."""
        name = self.sheet.fresh("m")
        self.scope.init.append(f"self.{name} = {expression}")
        return f"self.{name}"

    def linear(self, fan_in: int, fan_out: int, bias: bool = True) -> str:
        """A linear layer."""
        more = "" if bias else ", bias=False"
        return self.module(f"nn.Linear({fan_in}, {fan_out}{more})")

    def parameter(self, *shape: int) -> str:
        """A parameter of random numbers."""
        size = ", ".join(map(str, shape))
        return self.module(f"nn.Parameter(torch.randn({size}))")

    def buffer(self, expression: str) -> str:
        """A buffer."""
        name = self.sheet.fresh("m")
        self.scope.init.append(f'self.register_buffer("{name}", {expression})')
        return f"self.{name}"

    def input(self, name: str, expression: str, dim: int | None) -> str:
        """An argument of forward, made by `expression` of `length` and `batch`."""
        self.sheet.inputs.setdefault(name, (expression, dim))
        self.scope.used[name] = None
        return name

    def padding(self) -> str:
        """An argument: bool [batch, length], True for tokens that are no padding."""
        ends = "torch.randint(length // 2 + 1, length + 1, (batch, 1))"
        return self.input("padding", f"torch.arange(length) < {ends}", 1)

    def helper(self, text: str) -> None:
        """A class or function in front of the model."""
        self.sheet.helper(text.strip("\n"))

    @contextmanager
    def indented(self) -> Iterator[None]:
        """Lines inside are one level deeper."""
        self.scope.depth += 1
        yield
        self.scope.depth -= 1

    def body(self, start: str, scope: Scope | None = None) -> str:
        """Write the body, from variable `start` on; the variable that it ends with."""
        value = Value(start, self.lengths)
        self.sheet.values["-" + self.statement.name] = value
        for statement in self.statement.body:
            value = write_statement(self.sheet, scope or self.scope, statement)
        self.lengths = value.lengths
        return value.text


def write_statement(sheet: Sheet, scope: Scope, statement: Statement) -> Value:
    """Write one statement, and remember its value under its name."""
    site = Site(sheet, scope, statement)
    sheet.kinds[statement.kind].write(site)
    value = sheet.values[statement.name] = Value(site.out, site.lengths)
    return value


def class_text(name: str, scope: Scope, arguments: list[str], result: str) -> str:
    """The text of a module."""
    init = ["super().__init__()", *scope.init]
    forward = [*scope.lines, f"return {result}"]
    return "\n".join(
        [
            f"class {name}(nn.Module):",
            "    def __init__(self):",
            *(f"        {line}" for line in init),
            "",
            f"    def forward(self, {', '.join(arguments)}):",
            *(f"        {line}" for line in forward),
        ]
    )
