"""Build wheel and sdist, and try both: `tools/in_venv python -m tools.release`.

Each is installed into an empty folder, and trains one step from there, so that a file
that it lacks is missed. With --tag the version has to be the tag's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMOKE = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import cpcompile as cp
assert cp.__file__.startswith(sys.argv[1]), cp.__file__
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
q = torch.ones(1, 2, 16, 8, requires_grad=True)
def attend(q):
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
options = {"mesh": mesh, "shard": {"q": 2}, "inner": "aot_eager"}
torch.compile(attend, backend="cp", options=options)(q).sum().backward()
assert cp.plan(batch=1, heads=8, kv_heads=8, head_dim=64, seq=4096, ranks=4).chosen
from cpcompile.kernels import render  # the templates
print("trained a step with", cp.__file__)
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tag", help="v and the version, else nothing is built")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder")
    given = parser.parse_args(arguments)
    with (ROOT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    if given.tag not in (None, f"v{version}"):
        sys.exit(
            f"release: the tag is {given.tag} and the version of pyproject.toml is "
            f"{version}; needed v{version}: change one of them"
        )
    for made in build(given.out):
        smoke(made)


def build(out: Path) -> list[Path]:
    """Build wheel and sdist in `out`; return their paths."""
    run("-m", "build", "--outdir", str(out), str(ROOT))
    return sorted(out.glob("cpcompile-*"), key=lambda path: path.suffix)


def smoke(made: Path) -> None:
    """Install `made` without dependencies, which are here; run it from elsewhere."""
    with tempfile.TemporaryDirectory() as name:
        where = Path(name).resolve()
        pip = ("-m", "pip", "install", "-qq", "--disable-pip-version-check")
        flags = ("--no-deps", "--target", str(where / "site"))
        run(*pip, *flags, str(made))
        env = os.environ | {"PYTHONPATH": str(where / "site"), "PYTHONSAFEPATH": "1"}
        run("-c", SMOKE, str(where), cwd=where, env=env)


def run(
    *command: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> None:
    """Run this Python with these arguments; what fails ends the release."""
    subprocess.run(
        [sys.executable, *command], check=True, timeout=600, cwd=cwd, env=env
    )


if __name__ == "__main__":
    main()
