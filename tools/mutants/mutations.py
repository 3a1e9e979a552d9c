"""Draw mutants of a checkout, with the operators of Cosmic Ray."""

from __future__ import annotations

import ast
import functools
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

# A file belongs to the last area that it lies in.
AREAS = ("passes", "cpcompile/ops", "passes/flow", "cpcompile/geometry")

# Changes that hardly change anything: of small numbers, nodes and members of enums.
ALIKE = ("_Eq_Is", "_NotEq_IsNot", "_Is_Eq", "_IsNot_NotEq")

Position = tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """One changed place of one file."""

    area: str
    file: str
    line: int
    operator: str
    occurrence: int  # of the operator in the file

    @property
    def name(self) -> str:
        """Name it, for records."""
        operator = self.operator.rpartition("/")[2]
        return f"{self.file}:{self.line} {operator}#{self.occurrence}"

    def source(self, tree: Path) -> str:
        """Return the changed text of the file."""
        text = mutate_code(
            (tree / self.file).read_text(), _operators()[self.operator], self.occurrence
        )
        assert text is not None, f"{self.name} is no place in {tree}"
        return str(text)

    def change(self, tree: Path) -> str:
        """Show the first line that changes: before -> after."""
        before = (tree / self.file).read_text().splitlines()
        after = self.source(tree).splitlines()
        pairs = ((x, y) for x, y in zip(before, after, strict=False) if x != y)
        old, new = next(pairs, (before[self.line - 1], ""))
        return f"{old.strip()} -> {new.strip()}"


def draw(tree: Path, count: int, seed: int = 0) -> list[Mutant]:
    """Draw about equally many mutants of each area.

    Files are drawn by their number of lines, then one place of those that an operator
    changes, then one change of it.
    """
    mutants: dict[str, Mutant] = {}
    files = _files(tree)
    areas = [area for area in AREAS if files[area]]
    for n, area in enumerate(areas):
        drawn = random.Random(f"{seed} {area}")  # more mutants are the same and others
        wanted = count * (n + 1) // len(areas) - len(mutants)
        names = list(files[area])
        weights = list(files[area].values())
        places: set[tuple[str, Position]] = set()
        tries = 50 * wanted  # a small area may have fewer places
        while wanted and (tries := tries - 1):
            (file,) = drawn.choices(names, weights)
            sites = _sites(tree / file)
            if not sites:
                continue
            place = drawn.choice(sorted(sites))
            operator, occurrence = drawn.choice(sites[place])
            mutant = Mutant(area, file, place[0], operator, occurrence)
            if (file, place) not in places and _compiles(mutant, tree):
                places.add((file, place))
                mutants[mutant.name] = mutant
                wanted -= 1
    return list(mutants.values())


def _files(tree: Path) -> Mapping[str, dict[str, int]]:
    """Return the number of lines of all files, by area."""
    files: dict[str, dict[str, int]] = defaultdict(dict)
    for top in ("passes", "cpcompile"):
        for path in sorted((tree / top).rglob("*.py")):
            file = path.relative_to(tree)
            if path.resolve().relative_to(tree.resolve()) != file:
                continue  # cpcompile/passes is a link
            inside = [x for x in AREAS if file.is_relative_to(x)]
            if inside:
                lines = path.read_text().count("\n")
                files[inside[-1]][str(file)] = lines
    return files


@functools.cache
def _operators() -> dict[str, Any]:
    classes = {x: plugins.get_operator(x) for x in plugins.operator_names()}
    return {
        name: operator()
        for name, operator in classes.items()
        if not operator.arguments() and not name.endswith(ALIKE)
    }


@functools.cache
def _sites(path: Path) -> dict[Position, list[tuple[str, int]]]:
    """Return all changes, as operator and occurrence, by their place."""
    source = path.read_text()
    skipped = list(_without_effect(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    sites: dict[Position, list[tuple[str, int]]] = defaultdict(list)
    for name, operator in _operators().items():
        positions = (p for x in nodes for p in operator.mutation_positions(x))
        for occurrence, (place, _) in enumerate(positions):
            if not any(first <= place < last for first, last in skipped):
                sites[place].append((name, occurrence))
    return sites


def _without_effect(module: ast.Module) -> Iterator[tuple[Position, Position]]:
    """Yield the places of annotations, and of decorators that only save time."""
    for node in ast.walk(module):
        parts: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts = [node.returns]
            parts += [x for x in node.decorator_list if "cache" in ast.unparse(x)]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            parts = [node.annotation]
        for part in parts:
            if part is not None:
                end = (part.end_lineno or part.lineno, part.end_col_offset or 0)
                # From the @ of a decorator on.
                yield (part.lineno, max(part.col_offset - 1, 0)), end


def _compiles(mutant: Mutant, tree: Path) -> bool:
    try:
        compile(mutant.source(tree), mutant.file, "exec")
    except SyntaxError:
        return False
    return True


def statement(source: str, line: int) -> range:
    """Return the lines of the smallest statement around `line`, without its body."""
    best = range(line, line + 1)
    smallest = float("inf")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            first = min([node.lineno, *(x.lineno for x in _decorators(node))])
            end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            lines = range(first, max(end, node.lineno) + 1)
            if line in lines and len(lines) < smallest:
                best, smallest = lines, len(lines)
    return best


def _decorators(node: ast.stmt) -> list[ast.expr]:
    return getattr(node, "decorator_list", [])
