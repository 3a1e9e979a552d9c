"""`python -m tools.bench`: every command is found and says what it can do."""

import pytest

from tools.bench.__main__ import MODULES, main


@pytest.mark.parametrize("name", MODULES)
def test_every_command_has_options_and_is_in_the_help(name, capsys):
    if name == "aot":
        pytest.importorskip("triton", reason="it compiles Triton kernels")
    printed = []
    for arguments in (["--help"], [name, "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        printed.append(capsys.readouterr().out)
    assert f"\n    {name} " in printed[0].partition("\n\n")[2]
    assert printed[1].startswith(f"usage: python -m tools.bench {name} ")
