"""The table cannot be right by accident: what counts as exact, refused, wrong."""

import dataclasses

import pytest
import torch

from tests.models import outcome
from tests.models.outcome import (
    Outcome,
    RankRun,
    Verdict,
    compare,
    judge,
    reference,
    rounded_otherwise,
)
from tests.models.plan import TRAIN, settings
from tests.models.run_case import short
from tests.models.setting import Mode, Setting
from tests.models.zoo import CASES
from tests.support.bounds import TIMES
from tools.models.report import mixer_counts

EXACT = {
    "loss": torch.tensor(2.0, dtype=torch.float64),
    "logits": torch.tensor([1.0, -4.0, torch.nan, torch.inf], dtype=torch.float64),
    "grad weight": torch.tensor([10.0, 0.0], dtype=torch.float64),
    "grad small": torch.tensor([2.0**-16, 0.0], dtype=torch.float64),
    "grad key.bias": torch.tensor([2.0**-40, 0.0], dtype=torch.float64),
}
PLAIN = {name: x.float() for name, x in EXACT.items()}


def got(**changes):
    return PLAIN | {name.replace("_", " "): x for name, x in changes.items()}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("loss", torch.tensor(2.0001), 5e-5),
        ("logits", torch.tensor([1.001, -4.0, torch.nan, torch.inf]), 2.5e-4),
        ("grad weight", torch.tensor([10.0, 0.01]), 1e-3),
        ("grad small", torch.tensor([2.0**-16 + 1e-6, 0.0]), 1e-3),  # of the floor
        ("grad key.bias", torch.tensor([1e-3, 0.0]), 1e-4),  # of the largest gradient
    ],
)
def test_a_difference_is_wrong(name, value, error):
    worst, mistakes = compare(PLAIN | {name: value}, EXACT, PLAIN)
    assert worst == pytest.approx(error, rel=0.05)
    assert [text.split(":")[0] for text in mistakes] == [name]


@pytest.mark.parametrize(
    "logits",
    [[1.0, -4.0, 0.0, torch.inf], [1.0, torch.nan, torch.nan, torch.inf]],
)
def test_nan_is_right_only_where_one_process_has_it(logits):
    _, mistakes = compare(got(logits=torch.tensor(logits)), EXACT, PLAIN)
    assert len(mistakes) == 1


def test_noise_in_a_gradient_that_is_zero():
    """Its scale is the largest gradient, 10."""
    allowed = 10 * TIMES * torch.finfo(torch.float32).eps
    noise = torch.tensor([allowed, -allowed])
    for share, wrong in ((0.9, 0), (1.1, 1)):
        got = PLAIN | {"grad key.bias": share * noise}
        assert len(compare(got, EXACT, PLAIN)[1]) == wrong


def test_as_inexact_as_one_process_is_exact():
    """Of several rough results the worst counts."""
    assert compare(PLAIN, EXACT, PLAIN) == (0.0, [])
    plain = PLAIN | {"loss": torch.tensor(2 + 2**-10)}
    within, beyond = (
        got(loss=torch.tensor(2 - share * TIMES * 2**-10)) for share in (0.9, 1.1)
    )
    assert compare(within, EXACT, PLAIN)[1] != []
    for rough in ((plain,), (PLAIN, plain), (plain, PLAIN)):
        assert compare(within, EXACT, *rough)[1] == []
    (text,) = compare(beyond, EXACT, plain)[1]
    assert text == "loss: error 0.0043, allowed 0.00391"


LESS = {name: x for name, x in PLAIN.items() if name != "grad weight"}


@pytest.mark.parametrize(
    ("values", "mistakes"),
    [
        (LESS, ["grad weight is missing"]),
        (
            PLAIN | {"grad other": torch.tensor([0.0, 1.0])},
            ["grad other is there, but not in one process"],
        ),
        (PLAIN | {"grad other": torch.zeros(2)}, []),  # unused
        (PLAIN | {"loss": torch.tensor([2.0])}, ["loss has shape [1], not []"]),
    ],
)
def test_missing_and_additional_gradients(values, mistakes):
    assert compare(values, EXACT, PLAIN)[1] == mistakes


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(outcome, "reference", lambda name, setting: (EXACT, PLAIN))


REFUSED = RankRun(error=("RewriteError", "attention at ...", True))
BROKEN = RankRun(error=("TypeError", "no", False))
FINE = RankRun(
    values=PLAIN,
    calls=(("a", "ring zigzag", None), ("b", None, "mask")),
    mixers=("states", "gather"),
)


@pytest.mark.parametrize(
    ("runs", "verdict", "text"),
    [
        ([FINE, FINE], Verdict.EXACT, ""),
        ([REFUSED, REFUSED], Verdict.REFUSED, "RewriteError: attention at ..."),
        ([FINE, REFUSED], Verdict.CRASH, "(on 1 ranks only)"),
        ([BROKEN, BROKEN], Verdict.CRASH, "TypeError: no"),
        (
            [FINE, dataclasses.replace(FINE, mistakes=2)],
            Verdict.CRASH,
            "2 attempts failed by a mistake in cpcompile",
        ),
        ([dataclasses.replace(REFUSED, mistakes=1)] * 2, Verdict.CRASH, "attention"),
        (
            [FINE, dataclasses.replace(FINE, values=got(loss=torch.tensor(3.0)))],
            Verdict.WRONG,
            "loss: error 1, allowed",
        ),
    ],
)
def test_verdicts(known, runs, verdict, text):
    judged = judge("llama/default", TRAIN, runs)
    assert judged.verdict is verdict
    assert text in judged.text


def test_other_roundings_lead_a_little_away():
    exact = reference("llama/default", TRAIN)[0]
    other = rounded_otherwise("llama/default", TRAIN)
    assert other.keys() == exact.keys()
    _, mistakes = compare({**exact, **other}, exact, exact)
    assert mistakes == []
    assert any(not torch.equal(other[name], exact[name]) for name in other)


def test_what_the_table_shows_of_a_run(known):
    judged = judge("llama/default", TRAIN, [FINE, FINE])
    assert (judged.sharded, judged.attention) == (1, 2)
    assert judged.strategies == ("ring zigzag",)
    assert judged.not_sharded == ("mask",)
    assert judged.mixers == ("states", "gather")


def test_mixers_are_counted_by_strategy():
    mixers = ("exchange", "states", "exchange")
    assert mixer_counts(mixers) == "2/3 exchange, 1/3 states"
    assert mixer_counts(mixers, "states") == "1/3 states"
    assert mixer_counts(mixers, "gather") == "0/3 gather"
    assert mixer_counts(()) == mixer_counts((), "states") == ""


def test_settings_of_cases_differ_and_each_strategy_is_forced_on_mixers():
    """Ring and Ulysses only where there is attention."""
    for case in CASES.values():
        found = settings(case)
        assert len(set(found)) == len(found)
        assert settings(case, quick=True) == found[:2]
        forced = {(x.world, x.mixers) for x in found if x.mixers != "auto"}
        both = {(n, how) for n in (2, 4) for how in ("exchange", "states")}
        assert forced == (both if case.mixers else set())
        assert case.attention or all(x.strategy == "auto" for x in found)
    both = Setting(strategy="ring", mixers="states").options()["strategy"]
    assert both == "ring, states"
    assert Setting(strategy="ring").options()["strategy"] == "ring, auto"


def test_records_can_be_read_again():
    setting = Setting(world=4, mode=Mode.CALLS, strategy="ring", annotated=False)
    kept = {"warnings": ("x",), "graphs": 2, "mixers": ("states", "states")}
    run = Outcome("a/b", setting, Verdict.EXACT, 1e-6, **kept)
    assert Outcome.from_json(run.as_json()) == run


def test_messages_name_files_without_their_folders():
    text = 'at model (File "/usr/lib/python3/site/a_b.py", line 3, in f)\n  needed more'
    assert short(text) == 'at model (File "a_b.py", line 3, in f) needed more'
