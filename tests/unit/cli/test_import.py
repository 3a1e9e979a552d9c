"""Importing is light, the backend is found without it, and the link is a link."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cpcompile

ROOT = Path(__file__).parents[3]
HEAVY = (
    "torch._inductor",
    "triton",
    "sympy",
    "torch._dynamo",
    "torch.distributed.tensor",
)


def run(program):
    """What `program` prints, in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_LOGS"}
    completed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


def test_the_import_is_light():
    """Whatever torch itself imports was imported by it."""
    program = """
import json, sys, torch
import torch.utils._config_module
before = set(sys.modules)
import cpcompile
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    added = json.loads(run(program))
    assert "cpcompile" in added
    assert not [name for name in added if name.startswith(HEAVY)]
    assert all(name.startswith("cpcompile") for name in added), added


def test_the_backend_is_found_by_its_entry_point():
    program = """
import sys, torch._dynamo
assert not any(name.startswith("cpcompile") for name in sys.modules)
assert "cp" in torch._dynamo.list_backends()
assert not any(name.startswith("cpcompile") for name in sys.modules)
from torch._dynamo.backends.registry import lookup_backend
found = lookup_backend("cp")
print(found.__module__, found.__name__)
"""
    assert run(program) == "cpcompile.backend cp"


def test_every_name_exists():
    assert dir(cpcompile) == sorted(cpcompile.__all__)
    assert all(getattr(cpcompile, name) is not None for name in cpcompile.__all__)
    with pytest.raises(AttributeError, match="'cpcompile' has no attribute 'Ring'"):
        _ = cpcompile.Ring
    program = "import cpcompile; print(set(cpcompile.__all__) <= set(dir(cpcompile)))"
    assert run(program) == "True"


def test_the_passes_are_a_link():
    link = ROOT / "cpcompile" / "passes"
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("..", "passes")
    assert (link / "pipeline.py").is_file()
    from cpcompile.passes import pipeline

    assert pipeline.__name__ == "cpcompile.passes.pipeline"
    assert Path(pipeline.__file__).resolve() == ROOT / "passes" / "pipeline.py"
