"""The code of the documentation's pages runs, on two ranks, each page from its top."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

DOCS = Path(__file__).parents[3] / "docs"
# The other pages of how-to quote scripts, which test_howto.py runs.
PAGES = (
    "start.md",
    "behaviour.md",
    "howto/ddp.md",
    "howto/inputs.md",
    "howto/long_sequences.md",
    "howto/packed_documents.md",
    "howto/mixers.md",
    "howto/strategies.md",
    "howto/verify.md",
    "reference/settings.md",
)


def blocks(page: str) -> list[str]:
    """What stands between ```python and ```."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_page(page: str) -> int:
    """On every rank; returns how many blocks ran.

    `main` of the first program is not called: the ranks have their process group, and
    Inductor takes long. What pages take from it is made here as it makes it.
    """
    first, *_ = blocks("start.md")
    names: dict[str, Any] = {"__name__": "documentation"}
    exec(first, names)
    names["init_device_mesh"] = init_device_mesh
    ranks = dist.get_world_size()
    names["mesh"] = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    names["model"] = names["Model"]()
    text = torch.randint(0, 256, (1, 513))
    names["tokens"], names["labels"] = text[:, :-1], text[:, 1:]
    names["options"] = {"mesh": names["mesh"], "shard": {"tokens": 1, "labels": 1}}
    names["step"] = compiled(names["model"], backend="cp", options=names["options"])
    found = blocks(page)[1 if page == "start.md" else 0 :]
    with mock.patch.object(torch, "compile", compiled):
        for number, block in enumerate(found):
            exec(compile(block, f"{page}, block {number}", "exec"), names)
    return len(found)


_compile = torch.compile


@functools.wraps(torch.compile)
def compiled(model: Any = None, *, options: Any = None, **kwargs: Any) -> Any:
    """torch.compile with aot_eager inside of "cp"."""
    if kwargs.get("backend") == "cp":
        options = {"inner": "aot_eager", **(options or {})}
    return _compile(model, options=options, **kwargs)


@pytest.mark.parametrize(
    ("page", "ranks"), [*((page, 2) for page in PAGES), ("behaviour.md", 4)]
)
def test_code_of_a_page(pools, page, ranks):
    count = len(blocks(page)) - (page == "start.md")
    assert count
    assert pools[ranks].run(run_page, page, timeout=150) == [count] * ranks
