"""A digest of our sources, for the keys of torch's caches.

Inductor's cache sees neither our templates nor our order of a graph. A rank with an old
entry would wait for the others forever.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib


@functools.cache
def sources_digest() -> str:
    """Return a digest that changes with each of our sources."""
    digest = hashlib.sha256()
    for path in sources(pathlib.Path(__file__).parents[1]):
        digest.update(path.read_bytes())
    return f"cpcompile {digest.hexdigest()[:16]}"


def sources(package: pathlib.Path) -> list[pathlib.Path]:
    """List our sources, with those of the passes: in a checkout these are a link."""
    folders = (package, package / "passes")
    paths = {p for f in folders for end in ("*.py", "*.jinja") for p in f.rglob(end)}
    return sorted(paths)
