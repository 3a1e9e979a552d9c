"""Lines per concern: each file in one, and ceilings that only fall."""

import pytest

from tools import lines


def test_which_files_count_where(tmp_path):
    assert lines.concern_of("cpcompile/geometry/degrees.py").startswith("attention")
    assert lines.concern_of("cpcompile/geometry/mask_tiles.py") == "masks"
    assert lines.concern_of("cpcompile/frontend/image_rows.py").startswith("moved")
    with pytest.raises(KeyError, match=r"other/new\.py belongs to no concern"):
        lines.concern_of("other/new.py")
    paths = [x for listed in lines.CONCERNS.values() for x in listed.split()]
    assert len(paths) == len(set(paths))
    root = lines.ROOT
    files = [x.relative_to(root).as_posix() for x in lines._python_files(root)]
    assert [x for x in paths if not any(f.startswith(x) for f in files)] == []
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes" / "pipeline.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "cpcompile").mkdir()
    (tmp_path / "cpcompile" / "passes").symlink_to("../passes")
    counted, files = lines.count(tmp_path)
    assert counted == {"graph helpers": 2} and files == {"graph helpers": 1}


def test_ceilings():
    at = dict.fromkeys(lines.CONCERNS, 100)
    assert lines.complaints(at, at) == []
    above, below = lines.complaints(at | {"masks": 101, "flow": 70}, at)
    assert "masks: 101 lines, the ceiling is 100" in above
    assert "flow: 70 lines, the ceiling is still 100" in below
    assert lines.lower(at | {"masks": 101, "flow": 70}, at) == at | {"flow": 70}
    before = {"masks": 100, "flow": 50, "tests": 10}
    assert lines.raised(before, before | {"masks": 90, "flow": 60}) == []
    product, tests = lines.raised(before, {"masks": 101, "flow": 50, "tests": 11})
    assert product.startswith("cpcompile and passes: the ceiling was 150 and is 151")
    assert tests.startswith("tests: the ceiling was 10")
