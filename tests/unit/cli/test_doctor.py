"""The doctor says what is here, and every problem comes with its fix."""

import json
import tomllib
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from cpcompile.apps.cli import doctor
from cpcompile.apps.cli.doctor import Finding, findings_here, report
from cpcompile.apps.cli.main import main
from cpcompile.compile import ring_probe
from cpcompile.cost.hardware.profile import load_profile, write_profile
from cpcompile.torch_patches import inductor_compat


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    """No measured profiles, and nothing of the caller's environment."""
    monkeypatch.setenv("CPCOMPILE_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    monkeypatch.delenv("CXX", raising=False)


def finding(name):
    return next(f for f in findings_here() if f.name == name)


def test_the_report():
    findings = [
        Finding("versions", "torch", "2.13.0"),
        Finding("versions", "sympy", "1.14.0"),
        Finding("backends", "C++ compiler", "none", "it is needed", "install g++"),
    ]
    assert_expected_inline(
        report(findings),
        """\
versions
  torch         2.13.0
  sympy         1.14.0
backends
  C++ compiler  none
problems: 1
  C++ compiler: it is needed
    -> install g++""",
    )
    assert report(findings[:2]).splitlines()[-1] == "problems: none"


def test_this_machine():
    topics = list(dict.fromkeys(f.topic for f in findings_here()))
    assert topics == [
        "versions",
        "devices",
        "backends",
        "private interfaces of torch",
        "cost model",
    ]
    assert finding('backend="cp"').value == "registered"
    assert "gloo" in finding("torch.distributed").value
    count = len(inductor_compat.PROBES)
    assert finding("probes").value == f"{count} of {count} fit"
    assert finding("tiny ring").value == "unrolled"
    assert all((f.problem is None) == (f.fix is None) for f in findings_here())


def test_exit_codes_and_json(capsys, monkeypatch):
    broken = Finding("versions", "torch", "missing", "it is missing", "install it")
    monkeypatch.setattr(doctor, "findings_here", lambda: [broken])
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [
        {
            "topic": "versions",
            "name": "torch",
            "value": "missing",
            "problem": "it is missing",
            "fix": "install it",
        }
    ]
    monkeypatch.setattr(doctor, "findings_here", lambda: [Finding("a", "b", "c")])
    assert main(["doctor"]) == 0


PROBLEM = "a.b:c takes no x"


@pytest.mark.parametrize(
    ("module", "name", "result", "ring"),
    [
        (inductor_compat, "problems", lambda: (PROBLEM,), "unrolled"),
        (ring_probe, "ring_problem", lambda device: PROBLEM, "refused"),
    ],
)
def test_probes_that_do_not_fit(monkeypatch, module, name, result, ring):
    monkeypatch.setattr(module, name, result)
    found = finding("probe 1")
    assert found.problem == (
        f"{PROBLEM}; rings are not unrolled, and their steps are eager operators"
    )
    assert found.fix == "install torch 2.13 to 2.15, or report it with this output"
    if module is ring_probe:
        assert finding("tiny ring").value == "refused"
    else:
        count = len(inductor_compat.PROBES)
        assert finding("probes").value == f"{count - 1} of {count} fit"


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (None, "torch is not installed"),
        ("2.12.1", "torch 2.12.1 is older than 2.13"),
        ("2.13.0+cpu", None),
        ("2.15.0.dev20261101", None),
        ("2.16.0", "torch 2.16.0 is newer than 2.15, the last one that was tried"),
    ],
)
def test_versions_of_torch(version, problem):
    assert doctor._torch_version(version).problem == problem


def test_what_this_machine_may_lack(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = finding("C++ compiler")
    assert found.problem == "Inductor needs one for graphs on a CPU"
    assert found.fix is not None and "aot_eager" in found.fix
    monkeypatch.setenv("TORCH_LOGS", "")
    found = findings_here()[-1]
    assert found.problem == "an empty TORCH_LOGS breaks `import torch` in 2.13"
    path = Path(__file__).parents[3] / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    low, high = doctor.TORCH_VERSIONS
    claim = f"torch>={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"
    assert claim in project["dependencies"]


def test_measured_profiles_are_listed(tmp_path):
    folder = tmp_path / "profiles"
    folder.mkdir()
    path = folder / "cpu_4_ranks.json"
    write_profile(load_profile("cpu"), path)
    found = finding("measured here")
    assert (found.value, found.problem) == (str(path), None)
    path.write_text("{}")
    found = finding("measured here")
    assert found.problem is not None and found.problem.startswith(f"{path}: ")
    assert found.fix == "run `cpcompile calibrate` again, or remove the file"


def test_without_torch(monkeypatch):
    version = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: None if name == "torch" else version(name)
    )
    found = findings_here()
    assert {f.topic for f in found} == {"versions"}
    assert [f.fix for f in found if f.problem] == ["install torch 2.13 to 2.15"]
