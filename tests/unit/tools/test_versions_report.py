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
