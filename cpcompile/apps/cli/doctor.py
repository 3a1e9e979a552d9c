"""`cpcompile doctor`: what is here, what is wrong, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpcompile.cost.hardware.profile import read_profile
from cpcompile.cost.hardware.selection import calibrated_path, shipped_profile
from cpcompile.cost.plain_data import to_json

TORCH_VERSIONS = ((2, 13), (2, 15))  # as in pyproject.toml
_GROUPS_TO_LOOK_FOR = (1, *(2**i for i in range(1, 11)))
_COMPILERS = ("c++", "g++", "clang++")


@dataclass(frozen=True)
class Finding:
    """One fact of this machine; `problem` says what is wrong, `fix` what to do."""

    topic: str
    name: str
    value: str
    problem: str | None = None
    fix: str | None = None


def run(*, as_json: bool = False) -> int:
    """Print what is found here; return 1 if there is any problem."""
    findings = findings_here()
    print(to_json(findings) if as_json else report(findings))
    return int(any(f.problem is not None for f in findings))


def findings_here() -> list[Finding]:
    """Collect everything that can be said of this machine."""
    findings = list(_versions())
    if os.environ.get("TORCH_LOGS") == "":
        findings.append(
            Finding(
                "torch",
                "TORCH_LOGS",
                '""',
                "an empty TORCH_LOGS breaks `import torch` in 2.13",
                "unset TORCH_LOGS; nothing below was looked at",
            )
        )
        return findings
    if _version("torch") is None:
        return findings
    return [*findings, *_devices(), *_backends(), *_private_interfaces(), *_profiles()]


def report(findings: Sequence[Finding]) -> str:
    """List the findings by topic, and after them the problems with their fixes."""
    lines, width = [], max(len(f.name) for f in findings)
    for topic in dict.fromkeys(f.topic for f in findings):
        lines.append(topic)
        lines += [
            f"  {f.name.ljust(width)}  {f.value}" for f in findings if f.topic == topic
        ]
    problems = [f for f in findings if f.problem is not None]
    lines.append(f"problems: {len(problems) or 'none'}")
    for finding in problems:
        lines += [f"  {finding.name}: {finding.problem}", f"    -> {finding.fix}"]
    return "\n".join(lines)


def _versions() -> Iterator[Finding]:
    topic = "versions"
    yield Finding(topic, "cpcompile", _version("cpcompile") or "not installed")
    yield Finding(topic, "python", f"{platform.python_version()} ({sys.executable})")
    yield _torch_version(_version("torch"))
    for name in ("sympy", "numpy", "networkx"):
        yield Finding(topic, name, _version(name) or "missing")
    yield Finding(topic, "triton", _version("triton") or "missing: needed on GPUs only")
    pictures = 'missing: for pictures, pip install "cpcompile[plot]"'
    yield Finding(topic, "matplotlib", _version("matplotlib") or pictures)


def _torch_version(version: str | None) -> Finding:
    low, high = (".".join(map(str, v)) for v in TORCH_VERSIONS)
    fix = f"install torch {low} to {high}"
    if version is None:
        return Finding("versions", "torch", "missing", "torch is not installed", fix)
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < TORCH_VERSIONS[0]:
        problem = f"torch {version} is older than {low}"
    elif (major, minor) > TORCH_VERSIONS[1]:
        problem = f"torch {version} is newer than {high}, the last one that was tried"
        fix = f"if anything fails, {fix}"
    else:
        return Finding("versions", "torch", version)
    return Finding("versions", "torch", version, problem, fix)


def _devices() -> Iterator[Finding]:
    import torch  # takes a second; what was said before does not need it

    topic = "devices"
    yield Finding(topic, "cpu", f"{platform.machine()}, {os.cpu_count()} cores")
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory = f"{facts.total_memory / 2**30:.1f} GiB"
        kind = f"compute capability {facts.major}.{facts.minor}"
        yield Finding(topic, f"cuda:{index}", f"{facts.name}, {memory}, {kind}")
    built = torch.version.cuda or torch.version.hip
    driver = Path("/dev/nvidiactl").exists() or Path("/dev/kfd").exists()
    if driver and not torch.cuda.is_available():
        problem = "there is a GPU, and torch cannot use it"
        fix = (
            "compare the driver with the CUDA or ROCm version of torch"
            if built
            else "install a build of torch for CUDA or ROCm: pytorch.org/get-started"
        )
        yield Finding(topic, "cuda", "not available", problem, fix)
    if torch.cuda.is_available() and _version("triton") is None:
        problem = "without Triton, steps of attention run on aten's kernels"
        yield Finding(topic, "triton", "missing", problem, "pip install triton")


def _backends() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    topic = "backends"
    is_registered = "cp" in torch._dynamo.list_backends(exclude_tags=())
    yield Finding(
        topic,
        'backend="cp"',
        "registered" if is_registered else "not found",
        None if is_registered else "torch.compile does not know the backend",
        None
        if is_registered
        else "install cpcompile again, so that its entry point is there",
    )
    names = ("gloo", "nccl", "mpi", "ucc", "xccl")
    available = [
        n for n in names if dist.is_available() and dist.is_backend_available(n)
    ]
    needed = ["gloo", *(["nccl"] if torch.cuda.is_available() else [])]
    missing = [name for name in needed if name not in available]
    yield Finding(
        topic,
        "torch.distributed",
        ", ".join(available) or "none",
        f"{' and '.join(missing)} cannot be used" if missing else None,
        "install a build of torch with it" if missing else None,
    )
    named = os.environ.get("CXX")
    compilers = (named,) if named else _COMPILERS
    path = next(filter(None, map(shutil.which, compilers)), None)
    yield Finding(
        topic,
        "C++ compiler",
        path or "none",
        None if path else "Inductor needs one for graphs on a CPU",
        None if path else 'install g++, set CXX, or use options={"inner": "aot_eager"}',
    )


def _private_interfaces() -> Iterator[Finding]:
    # Both import Inductor, which is slow.
    import torch

    from cpcompile.torch_patches.inductor_compat import PROBES, problems

    topic = "private interfaces of torch"
    issues = problems()
    yield Finding(topic, "probes", f"{len(PROBES) - len(issues)} of {len(PROBES)} fit")
    if not issues:
        # It is what the symbols are for, and may itself miss one of them.
        from cpcompile.compile.ring_probe import ring_problem

        problem = ring_problem("cuda" if torch.cuda.is_available() else "cpu")
        yield Finding(topic, "tiny ring", "unrolled" if problem is None else "refused")
        issues = () if problem is None else (problem,)
    low, high = (".".join(map(str, v)) for v in TORCH_VERSIONS)
    for number, problem in enumerate(issues, 1):
        yield Finding(
            topic,
            f"probe {number}",
            problem,
            f"{problem}; rings are not unrolled, and their steps are eager operators",
            f"install torch {low} to {high}, or report it with this output",
        )


def _profiles() -> Iterator[Finding]:
    import torch

    topic = "cost model"
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    name = torch.cuda.get_device_name() if gpu else ""
    yield Finding(topic, f"profile for {device}", shipped_profile(device, name).name)
    paths = [calibrated_path(device, ranks) for ranks in _GROUPS_TO_LOOK_FOR]
    measured = [path for path in paths if path.is_file()]
    if not measured:
        nothing = "nothing yet: `cpcompile calibrate` does it"
        yield Finding(topic, "measured here", nothing)
    for path in measured:
        try:
            read_profile(path)
        except ValueError as error:
            fix = "run `cpcompile calibrate` again, or remove the file"
            yield Finding(topic, "measured here", str(path), str(error), fix)
        else:
            yield Finding(topic, "measured here", str(path))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
