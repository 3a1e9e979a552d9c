"""A release is built of a tag that is its version, and works where it is installed."""

import pytest

from tools import release


def test_a_tag_of_another_version_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"the tag is v9.9.9 and the version of pypr"):
        release.main(["--tag", "v9.9.9", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(600)
def test_wheel_and_sdist_are_whole(tmp_path, capfd):
    release.main(["--out", str(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 2
    assert capfd.readouterr().out.count("trained a step with") == 2
