"""Programs around attention: what the passes must keep equal to one process."""

import pytest

from tests.cpu.programs import PROGRAMS, run_program
from tests.support.bounds import check


@pytest.mark.timeout(120)
@pytest.mark.parametrize("door", ["plain", "dtensor"])
@pytest.mark.parametrize(("seq", "world"), [(16, 2), (17, 3)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_equals_one_process(pools, name, seq, world, door):
    program = PROGRAMS[name]
    runs = pools[world].run(run_program, program, seq, world, door, timeout=90)
    for deviations, rewritten in runs:
        check(deviations)
        expected = {"Breaks": [1, 1], "ModuleEncoder": [2], "SequenceFirst": [2]}
        twice = {"ThreeDims": [2], "OneKeyHead": [2]}
        if name != "Helpers":  # its calls are in frames that Dynamo may cut otherwise
            assert rewritten == (expected | twice).get(name, [1])
