"""Draws a program: the same one for the same seed, on every machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from tests.fuzz.kinds import INNER, OUTER, losses, views
from tests.fuzz.program import Program, Setting, Statement
from tests.fuzz.site import Kind

# How often a choice is not the simplest one: most statements differ in a few only.
ODD = 0.35


@dataclass(frozen=True)
class Wishes:
    """What the caller decides; the seed decides the rest.

    inductor: the share of programs that Inductor compiles.
    kinds: each program has a statement of one of these; () is any.
    """

    worlds: tuple[int, ...] = (2, 3)
    inductor: float = 0.0
    dtype: str = "float64"
    kinds: tuple[str, ...] = ()


def draw(seed: int, wishes: Wishes = Wishes()) -> Program:
    """The program of a seed."""
    random = Random(f"cpcompile {seed}")
    setting = _setting(random, wishes)
    return _Drawing(random).program(seed, setting, wishes.kinds)


def _setting(r: Random, wishes: Wishes) -> Setting:
    inner = "inductor" if r.random() < wishes.inductor else "aot_eager"
    world = r.choice(wishes.worlds)
    length = r.choice([8, 12, 13, 15, 16, 17, 18, 24, 24, 31, 32, 36, 48])
    if r.random() < 0.04:
        length = r.randrange(1, 8)
    lengths = (length,)
    if r.random() < (0.08 if inner == "inductor" else 0.2):
        lengths = (
            length,
            *r.choices([length, 12, 20, 24, 30, 21], k=r.choice([1, 1, 2])),
        )
    if "changing" in wishes.kinds and inner == "aot_eager":
        lengths = (length,) * 3
    heads = r.choice([1, 2, 2, 4, 4, 3])
    width = heads * r.choice([4, 4, 8])
    strategies = ["auto", "auto", "ring", "ring", "ring", "all_gather", "ulysses"]
    layouts = ["auto", "auto", "auto", "contiguous", "zigzag", "striped", "fold"]
    if world == 4:
        strategies.append("hybrid")
    return Setting(
        world=world,
        batch=r.choice([1, 2, 2, 2, 3]),
        width=width,
        heads=heads,
        lengths=lengths,
        growth=int(len(lengths) > 1 and r.random() < 0.4),
        door=r.choice(["named", "inferred", "inferred", "dtensor"]),
        mode="no_grad" if r.random() < 0.2 else "train",
        dtype=wishes.dtype,
        inner=inner,
        strategy=r.choice(strategies),
        layout=r.choice(layouts),
        unroll=r.choice(["auto", "auto", 0, 8]),
        strict=r.random() < 0.6,
        gather_outputs_megabytes="auto" if r.random() < 0.85 else 0,
        dynamic=True if len(lengths) > 1 and r.random() < 0.3 else None,
    )


class _Drawing:
    """One program while it is drawn."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.count = 0

    def program(
        self, seed: int, setting: Setting, wanted: tuple[str, ...] = ()
    ) -> Program:
        r = self.random
        sources = [self.statement("source", losses.SOURCES["source"], ())]
        if r.random() < 0.2:
            sources.append(self.statement("source", losses.SOURCES["source"], ()))
        # streams: the values of each length; the last one of the first list is "here"
        streams = [[source.name] for source in sources]
        statements: list[Statement] = []
        few = (1, 1, 2, 2) if setting.inner == "inductor" else (1, 1, 2, 2, 3, 4)
        for number in range(r.choice(few)):
            first = number == 0 and r.random() < 0.7
            kinds = {"attention": OUTER["attention"]} if first else OUTER
            statements.append(self.step(kinds, streams))
        if wanted:
            statements.append(self.step({x: OUTER[x] for x in wanted}, streams))
        if not any("attention" in x.kind for s in statements for x in s.walk()):
            statements.append(self.step({"attention": OUTER["attention"]}, streams))
        last = statements[-1].name
        ends = [self.statement("loss", losses.LOSSES["loss"], (last,))]
        if r.random() < 0.2:
            value = r.choice(r.choice(streams))
            ends.append(self.statement("loss", losses.LOSSES["loss"], (value,)))
        chance, names = r.random(), [s.name for s in statements]
        returned = (last,) if chance < 0.25 else ()
        returned += (r.choice(names),) if chance < 0.08 else ()
        return Program(
            seed, setting, tuple(sources), tuple(statements), tuple(ends), returned
        )

    def step(self, kinds: Mapping[str, Kind], streams: list[list[str]]) -> Statement:
        """A statement on values of `streams`, whose value is put there."""
        r = self.random
        name, kind = self.pick(kinds)
        stream = r.choice(streams) if r.random() < 0.2 else streams[-1]
        first = stream[-1] if r.random() < 0.75 else r.choice(stream)
        operands = (first,)
        if kind.operands == 2:
            other = r.choice(streams) if kind.cross else stream
            operands += (r.choice(other),)
        statement = self.statement(name, kind, operands)
        if name == "length":
            streams.append([statement.name])
        else:
            stream.append(statement.name)
            streams.remove(stream)
            streams.append(stream)
        return statement

    def pick(self, kinds: Mapping[str, Kind]) -> tuple[str, Kind]:
        names = list(kinds)
        weights = [kinds[name].weight for name in names]
        name = self.random.choices(names, weights)[0]
        return name, kinds[name]

    def statement(self, name: str, kind: Kind, operands: tuple[str, ...]) -> Statement:
        r = self.random
        self.count += 1
        choices = tuple(
            (
                choice,
                r.choice(values[1:]) if r.random() < self.odd(values) else values[0],
            )
            for choice, values in kind.choices.items()
        )
        statement = Statement(
            kind=name,
            name=str(self.count),
            operands=operands,
            choices=choices,
            numbers=tuple(r.randrange(720) for _ in range(3)),
        )
        return (
            replace(statement, body=self.body(statement)) if kind.region else statement
        )

    def odd(self, values: tuple[str, ...]) -> float:
        """How often a choice is not the first: for many values nearly evenly."""
        return max(ODD, 1 - 1.5 / len(values))

    def body(self, region: Statement) -> tuple[Statement, ...]:
        r = self.random
        if region.kind == "views":
            steps = {name: Kind(lambda site: None) for name in views.STEPS}
            number = r.choice([1, 2, 3, 4])
            return tuple(self.statement(*self.pick(steps), ()) for _ in range(number))
        streams = [["-" + region.name]]
        return tuple(self.step(INNER, streams) for _ in range(r.choice([1, 1, 2])))
