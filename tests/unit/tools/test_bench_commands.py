"""`python -m tools.bench`: every command is found and says what it can do."""

import pytest

from tools.bench.__main__ import MODULES, main


@pytest.mark.parametrize("name", MODULES)
def test_every_command_has_options(name, capsys):
    if name == "aot":
        pytest.importorskip("triton", reason="it compiles Triton kernels")
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m tools.bench {name} ")


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    described = capsys.readouterr().out.partition("\n\n")[2]
    assert all(f"\n    {name} " in described for name in MODULES)
