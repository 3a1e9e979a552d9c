"""Real models: what docs/compatibility.md says of them is what happens.

Cases are a training step or a forward on two ranks, some of them through Inductor.
`python -m tools.models` runs all of them in every setting and writes that page.
"""

import json

import pytest

from tests.models.outcome import Outcome, Verdict
from tests.models.plan import COMPILED, fast_half, settings
from tests.models.run_case import run_case
from tests.models.setting import Setting
from tests.models.zoo import CASES
from tools.models.report import PAGE, RECORD, markdown

FIX = (
    "needed what is recorded; `tools/in_venv python -m tools.models --write` records "
    "what is true now"
)


def recorded(case: str, setting: Setting) -> Outcome | None:
    found = map(Outcome.from_json, json.loads(RECORD.read_text())["runs"])
    return next((o for o in found if (o.case, o.setting) == (case, setting)), None)


@pytest.mark.parametrize(
    ("case", "setting"), [pytest.param(*run, id=run[0]) for run in fast_half()]
)
def test_what_is_recorded_is_what_happens(pools, case, setting):
    check(pools, case, setting)


OF_MIXERS = [
    (case.name, setting)
    for case in CASES.values()
    if case.mixers
    for setting in settings(case)
    if setting.mixers != "auto"
]


@pytest.mark.parametrize(
    ("case", "setting"),
    [pytest.param(*run, id=f"{run[0]}, {run[1]}") for run in OF_MIXERS],
)
def test_mixers_by_a_strategy(pools, case, setting):
    check(pools, case, setting)


@pytest.mark.parametrize(
    "case", [name for name, case in CASES.items() if COMPILED in settings(case)]
)
def test_a_step_that_inductor_compiles(pools, case):
    check(pools, case, COMPILED)


def check(pools, case, setting):
    """One run, against its record."""
    want = recorded(case, setting)
    assert want is not None, f"{case}, {setting} has no record; {FIX}"
    got = run_case(pools, case, setting)
    assert got.verdict in (Verdict.EXACT, Verdict.REFUSED), got.text
    assert got.verdict is want.verdict, f"{got.text or got.verdict}; {FIX}"
    assert got.text == want.text, FIX
    assert (got.sharded, got.attention) == (want.sharded, want.attention), FIX
    if CASES[case].mixers:  # of others it is not recorded
        assert got.mixers == want.mixers, FIX


def test_page_is_made_from_the_record():
    assert PAGE.read_text() == markdown(json.loads(RECORD.read_text())), FIX


def test_every_case_is_recorded():
    rows = json.loads(RECORD.read_text())["runs"]
    assert {row["case"] for row in rows} == set(CASES), FIX
