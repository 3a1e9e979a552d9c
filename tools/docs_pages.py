"""Pages of the documentation that are made of the sources, while mkdocs builds it.

    internals/passes.md               the passes, from the docstrings of their modules
    internals/notes.md                the Notes of all modules
    internals/private_interfaces.md   which private names of torch are used, and where

A hook of mkdocs (mkdocs.yml names it). None of these pages is committed. Sources are
read as text: nothing of the package is imported.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PASSES = ROOT / "passes"
FAMILIES = "families.md"
_TUPLES = {
    "MODEL": "On the graph that Dynamo makes, before the joint graph is traced",
    "WHOLE": "On the joint graph of the whole sequence",
    "JOINT": "On the joint graph of one rank",
    "LOCAL": "On the graphs of one rank, in Inductor's compilation",
}
# In no tuple: where they stand instead.
_BESIDE = {
    "save_by_budget": (
        "joint/saving/save_by_budget.py",
        "in the place where AOTAutograd's partitioner chooses what the forward saves",
    ),
}
_NOTE = re.compile(r"^Note \[([^\]]+)\]$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages to those that mkdocs has found in docs/."""
    pages = {"passes": passes(), "notes": notes(), "private_interfaces": interfaces()}
    for name, text in pages.items():
        path = f"internals/{name}.md"
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Add the table of all families, which is a record, to their page."""
    if page.file.src_uri != FAMILIES:
        return markdown
    record = json.loads((ROOT / "docs" / "results" / "families.json").read_text())
    return markdown + every_family(record["runs"])


def every_family(rows: list[dict[str, Any]]) -> str:
    """Return the table of all families that are exact, from their record."""
    lines = [
        "## Exact",
        "",
        "- error: the largest one, as a share of the tensor's scale; in float64, where",
        "  that is what decided.",
        "- attention: calls that are shared out, of all. mixers: what mixes tokens by",
        "  other means and is shared out by a strategy of its own; a convolution or a",
        "  cumulative sum counts only if it needs more than its neighbours' tokens.",
        "- work: of all ranks together over that of one device.",
        "- gathered: KiB that a rank receives in both calls because a call of the",
        "  program needs a value whole that is split; empty where no forward was run.",
        "- library: whether the library claims to divide it.",
        "",
        "| family | error | attention | mixers | work | gathered | library |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["verdict"] == "exact":
            kib = f"{row['gathered'] / 1024:.0f}" if "gathered" in row else ""
            claim = {True: "yes", False: "no", None: ""}[row.get("divided by library")]
            calls = f"{row.get('sharded', 0)} of {row.get('attention', 0)}"
            cells = (
                row["case"].removeprefix("automatic/"),
                f"{row.get('error', 0.0):.0e}",
                calls,
                len(row.get("mixers", ())),
                f"{row.get('work', 0.0):.2f}",
                kib,
                claim,
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(["", *lines, ""])


def passes() -> str:
    """Return the page of the passes, in the order in which they run."""
    lines = [
        "# Passes",
        "",
        "Made of the docstrings of the modules, in the order in which the passes run.",
        "[Graphs and passes](../ideas/graphs_and_passes.md) explains how they work",
        "together. Listings are graphs before -> after.",
    ]
    text = (PASSES / "pipeline.py").read_text(encoding="utf-8")
    for name, title in _TUPLES.items():
        lines += ["", f"## {title}"]
        for run, reason in _tuple(text, name):
            lines += _pass(run, _module(text, run), reason)
    lines += ["", "## In no tuple"]
    for run, (path, place) in _BESIDE.items():
        lines += _pass(run, PASSES / path, place)
    lines += ["", "## Calls that passes write into graphs", ""]
    for name, sentence in sorted(_placement_calls()):
        lines.append(f"- `{name}`: {sentence}")
    lines += ["", "## Every module", ""]
    for path in sorted(PASSES.rglob("*.py")):
        if docstring := _docstring(path):
            name = path.relative_to(PASSES)
            lines.append(f"- `{name}`: {docstring.splitlines()[0]}")
    return "\n".join([*lines, ""])


def _tuple(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the passes of a tuple of pipeline.py, each with its comment."""
    body = text[text.index(f"\n{name}: ") :]
    for line in body[: body.index("\n)\n")].splitlines()[2:]:
        run, _, reason = line.strip().partition(",")
        yield run, reason.strip().removeprefix("# ")


def _module(text: str, run: str) -> Path:
    """Return the file that pipeline.py imports a pass from."""
    found = re.search(rf"^from \.([\w.]+) import .*\b{run}\b", text, re.MULTILINE)
    assert found is not None, f"pipeline.py does not import {run}"
    return PASSES / f"{found[1].replace('.', '/')}.py"


def _pass(run: str, path: Path, reason: str) -> list[str]:
    docstring = _docstring(path)
    first, _, rest = docstring.partition("\n")
    title = ["", f"### {run}", "", f"**{first}**", "", f"`{path.relative_to(ROOT)}`"]
    if reason:
        title[-1] += f": {reason}"
    return [*title, *_plain_notes(rest).splitlines()]


def _plain_notes(text: str) -> str:
    return _NOTE.sub(r"*Note: \1.*\n", text)


def _placement_calls() -> Iterator[tuple[str, str]]:
    """Yield functions of passes/placement, which run while AOTAutograd traces."""
    for path in (PASSES / "placement").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name[:3] != "cp_":
                continue
            if docstring := ast.get_docstring(node):
                arguments = ", ".join(a.arg for a in node.args.args)
                yield f"{node.name}({arguments})", docstring.split("\n\n")[0]


def notes() -> str:
    """Return the page of all Notes, by their names."""
    lines = [
        "# Notes",
        "",
        "Reasons that are too long for a comment stand in the code once, as a Note,",
        "and are cited by its name.",
    ]
    for name, path, text in sorted(_notes()):
        lines += ["", f"## {name}", "", f"`{path}`", "", "```text", text, "```"]
    return "\n".join([*lines, ""])


def _notes() -> Iterator[tuple[str, str, str]]:
    for path in _sources():
        text = path.read_text(encoding="utf-8")
        blocks = [_docstring(path)]
        blocks += re.findall(r"(?:^# ?.*\n)+", text, re.MULTILINE)
        for block in blocks:
            plain = re.sub(r"^# ?", "", block, flags=re.MULTILINE)
            _, *parts = _NOTE.split(plain)
            for name, body in zip(parts[::2], parts[1::2], strict=True):
                yield name, str(path.relative_to(ROOT)), body.strip()


def interfaces() -> str:
    """Return the page of the private names of torch that are used, by file."""
    lines = [
        "# Private interfaces of PyTorch",
        "",
        "Every import of a private name of torch, with the comment that stands above",
        'it in the code: what it is for, and which versions of torch it was "seen" in.',
        "`tools/constraints.txt` pins the version that the tests run with. Names that",
        "several modules need have one home, `cpcompile/torch_private`; fixes import",
        "what they fix in `cpcompile/torch_patches`; a module elsewhere says why it",
        "imports one itself. `cpcompile doctor` tries those of Inductor.",
    ]
    for path in _sources():
        uses = list(private_imports(path))
        attributes = sorted(private_attributes(path))
        if not uses and not attributes:
            continue
        lines += ["", f"## {path.relative_to(ROOT)}", ""]
        by_comment: dict[str, list[str]] = {}
        for name, comment in uses:
            by_comment.setdefault(comment, []).append(f"`{name}`")
        for comment, names in by_comment.items():
            said = f": {comment}" if comment else ""
            lines.append(f"- {', '.join(dict.fromkeys(names))}{said}")
        if attributes:
            lines.append(f"- attributes: {', '.join(f'`{a}`' for a in attributes)}")
    return "\n".join([*lines, ""])


def private_imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield private names that a file imports from torch, and the comment above each.

    Imports of a row share the comment above the first.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    last, comment = -1, ""
    nodes = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    for node in sorted(nodes, key=lambda node: node.lineno):
        if node.lineno - 2 != last:  # not right below an import
            comment = _comment_above(lines, node.lineno - 1)
        last = (node.end_lineno or node.lineno) - 1
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *parts = name.split(".")
            if first == "torch" and any(part.startswith("_") for part in parts):
                yield name, comment


def _comment_above(lines: list[str], at: int) -> str:
    words: list[str] = []
    while at and lines[at - 1].strip().startswith("#"):
        at -= 1
        words.insert(0, lines[at].strip().removeprefix("#").strip())
    return " ".join(words)


def private_attributes(path: Path) -> set[str]:
    """Return private attributes that a file reads of what it has not made itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {"_fields", *_defined(tree)}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            of = ast.unparse(node.value)
            if of not in {"self", "cls"} and node.attr not in own:
                found.add(node.attr if "(" in of else f"{of}.{node.attr}")
    return found


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _sources() -> Iterator[Path]:
    link = ROOT / "cpcompile" / "passes"
    for folder in ("cpcompile", "passes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if link not in path.parents:
                yield path


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
