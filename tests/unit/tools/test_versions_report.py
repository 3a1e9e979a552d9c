"""What is recorded of versions of torch, and the section that is made of it."""

from tools.models import record_tests

REPORT = """\
<testsuites><testsuite>
  <testcase classname="tests.unit.test_a" name="test_1" />
  <testcase classname="tests.unit.test_a.TestB" name="test_2[x]"><failure /></testcase>
  <testcase classname="tests.unit.test_c" name="test_3"><skipped /></testcase>
  <testcase classname="tests.golden.test_d" name="test_4"><error /></testcase>
</testsuite></testsuites>
"""


def test_reports_become_rows_by_folder(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    golden, unit = record_tests.rows([path], {"torch": "2.15.0", "date": "2026-11-22"})
    assert golden == {
        "torch": "2.15.0",
        "date": "2026-11-22",
        "folder": "tests/golden",
        "passed": 0,
        "skipped": 0,
        "failures": ["tests.golden.test_d.test_4"],
    }
    assert (unit["passed"], unit["skipped"]) == (1, 1)
    assert unit["failures"] == ["tests.unit.test_a.TestB.test_2[x]"]


def row(version, folder, date="2026-11-22", **counts):
    counts = {"passed": 1, "skipped": 0, "failures": []} | counts
    return {"torch": version, "folder": folder, "date": date, **counts}


def test_only_what_was_run_is_replaced():
    known = [row("2.9.1", "tests/cpu"), row("2.13.0+cpu", "tests/unit")]
    known.append(row("2.13.0+cpu", "tests/cpu", passed=7))
    found = [row("2.13.0+cpu", "tests/unit", passed=5), row("2.14.1", "tests/unit")]
    text = [
        (x["torch"], x["folder"], x["passed"])
        for x in record_tests.merged(known, found)
    ]
    assert text == [
        ("2.14.1", "tests/unit", 1),
        ("2.13.0+cpu", "tests/cpu", 7),
        ("2.13.0+cpu", "tests/unit", 5),
        ("2.9.1", "tests/cpu", 1),
    ]
