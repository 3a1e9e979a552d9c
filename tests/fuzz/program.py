"""What a random program is: statements with choices, and how it is compiled.

A program is kept as statements, not as text, so that it can be made smaller: every
statement takes values [batch, tokens, width] and gives one, so that any of them can be
left out (its first operand stands for it), and any choice can be replaced by the
simplest one. The text is written from them by render.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Statement:
    """One step of a program.

    kind: a name in tests.fuzz.kinds.
    name: its value; operands are names. The value that a body starts from is "-name".
    choices: (choice, value) of all choices that the kind has.
    numbers: small integers that decide what choices do not: dimensions, shifts.
    body: the statements inside, of a region or a chain of views.
    """

    kind: str
    name: str
    operands: tuple[str, ...] = ()
    choices: tuple[tuple[str, str], ...] = ()
    numbers: tuple[int, ...] = ()
    body: tuple[Statement, ...] = ()

    def with_choice(self, choice: str, value: str) -> Statement:
        """The same with another value of one choice."""
        return replace(
            self,
            choices=tuple((k, value if k == choice else v) for k, v in self.choices),
        )

    def walk(self) -> Iterator[Statement]:
        """This statement and all inside of it."""
        yield self
        for inside in self.body:
            yield from inside.walk()


@dataclass(frozen=True)
class Setting:
    """How a program is called and compiled.

    lengths: tokens of each call, one after the other with one compiled model.
    growth: how many rows each call has more than the one before.
    door: "named", "inferred" (plain tensors), "dtensor".
    mode: "train" (loss and gradients) or "no_grad".
    dtype: of parameters and inputs, "float64" or "float32".
    """

    world: int = 2
    batch: int = 2
    width: int = 16
    heads: int = 2
    lengths: tuple[int, ...] = (16,)
    growth: int = 0
    door: str = "named"
    mode: str = "train"
    dtype: str = "float64"
    inner: str = "aot_eager"
    strategy: str = "auto"
    layout: str = "auto"
    unroll: int | str = "auto"
    strict: bool = True
    gather_outputs_megabytes: float | str = "auto"
    dynamic: bool | None = None

    def options(self) -> dict[str, object]:
        """Options of the backend, but for mesh and shard."""
        names = ("strategy", "layout", "strict", "inner")
        return {name: getattr(self, name) for name in names}

    def settings(self) -> dict[str, object]:
        """What cpcompile.config is in the run."""
        names = ("unroll", "gather_outputs_megabytes")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        plain = Setting()
        different = [
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if value != getattr(plain, name)
        ]
        return ", ".join([f"{self.world} ranks", *different])


@dataclass(frozen=True)
class Program:
    """A model, its loss and its inputs.

    sources: the statements that make the first values, of inputs; the first is the
        main sequence.
    losses: their sum is the loss.
    returned: the names of values that the model returns beside the loss.
    """

    seed: int
    setting: Setting
    sources: tuple[Statement, ...]
    statements: tuple[Statement, ...]
    losses: tuple[Statement, ...]
    returned: tuple[str, ...] = ()

    def walk(self) -> Iterator[Statement]:
        """All statements, those inside of others too."""
        for statement in (*self.sources, *self.statements, *self.losses):
            yield from statement.walk()
