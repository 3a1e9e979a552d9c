"""Runs one case on every rank of a set of processes, and collects what happened."""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch._dynamo
from torch._dynamo.utils import counters

import cpcompile as cp
from cpcompile import errors, refusals
from cpcompile.accounting.graph_account import Account, GraphAccount, Kind, Purpose
from cpcompile.logs import warn_once
from cpcompile.reporting.graph_report import GraphReport, recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.workers import Pool, Pools, ProcessFailedError, ProcessTimeoutError
from tests.models.outcome import Outcome, RankRun, Verdict, judge
from tests.models.setting import Setting
from tests.models.steps import calls, make_model, run_steps
from tests.models.zoo import case_of

TIMEOUT_SECONDS = 300.0

REFUSALS = (
    errors.RewriteError,
    errors.InputError,
    errors.OptionError,
)
_SHIFTED_LABELS = ("<top level>", "pad")  # in the loss of transformers: no mixer
_FOLDER = re.compile(r"/[^\s:]*/(?=[^/\s:]+\.py\b)")  # of a file that a text names


def run_case(
    pools: Pools, name: str, setting: Setting, timeout: float = TIMEOUT_SECONDS
) -> Outcome:
    """Run on fresh or kept processes; never raises for what the case does."""
    pool: Pool = pools[setting.world]
    try:
        runs = pool.run(run_on_rank, name, setting, timeout=timeout)
    except (ProcessFailedError, ProcessTimeoutError) as error:
        text = str(error).strip().splitlines()
        return Outcome(
            name, setting, Verdict.CRASH, text=" ... ".join([text[0], text[-1]])
        )
    if any(run.error is not None and not run.error[2] for run in runs):
        pool.close()  # a rank may still be inside of a collective
    return judge(name, setting, runs)


def run_on_rank(name: str, setting: Setting) -> RankRun:
    """The steps, compiled by the backend; called on every rank."""
    torch._dynamo.reset()
    warn_once.cache_clear()
    counters["cpcompile"][refusals.COUNTER] = 0
    case = case_of(name)
    model = make_model(case)
    model = case.doubled(model) if setting.double else model
    dtype = torch.float64 if setting.double else torch.float32
    options = setting.options() | {"mesh": sequence_mesh(setting.world)}
    if setting.annotated:
        (inputs, _), *_ = calls(case, setting)
        options["shard"] = {k: dim for k, dim in case.shard.items() if k in inputs}
    step = torch.compile(model, backend="cp", options=options)
    start = time.monotonic()
    with warnings_of() as warnings, recording() as reports:
        try:
            how = {"hardware": "cpu"}
            with cp.config.patch(agreement_timeout_seconds=30.0, **how):
                values = run_steps(case, setting, model, step, dtype)
        except Exception as error:  # whatever a model can make torch raise
            raised = getattr(error, "inner_exception", None) or error
            return RankRun(
                error=(
                    type(raised).__name__,
                    short(str(raised)),
                    isinstance(raised, REFUSALS),
                ),
                trace=traceback.format_exc(),
                warnings=tuple(warnings),
                mistakes=counters["cpcompile"][refusals.COUNTER],
            )
    seconds = time.monotonic() - start
    graphs = list(dict.fromkeys(map(id, reports)))
    once: list[GraphReport] = [
        next(r for r in reports if id(r) == number) for number in graphs
    ]
    accounts = [account for report in once for account in report.accounts]
    return RankRun(
        values=values,
        calls=tuple(
            (call.path, _form(call), call.reason)
            for report in once
            for call in report.calls
        )
        + tuple((x.path, x.form, x.reason) for report in once for x in report.by_hand),
        mixers=tuple(
            x.strategy.value
            for report in once
            for x in report.mixers
            if (x.path, x.name) != _SHIFTED_LABELS
        ),
        warnings=tuple(warnings),
        graphs=len(once),
        distributed=sum(report.distributed_calls for report in once),
        seconds=seconds,
        work=Account(accounts).work().ratio if accounts else 0.0,
        gathered=gathered_bytes(accounts),
        mistakes=counters["cpcompile"][refusals.COUNTER],
    )


def gathered_bytes(accounts: Iterable[GraphAccount]) -> int:
    """Return what a rank receives of values that calls of the program need whole."""
    return sum(
        exchange.bytes
        for account in accounts
        for exchange in account.exchanges
        if exchange.kind is Kind.ALL_GATHER and exchange.purpose is Purpose.VALUE
    )


def short(text: str) -> str:
    """A message without the folders of files, on one line."""
    return " ".join(_FOLDER.sub("", text).split())


def _form(call) -> str | None:
    if call.plan is None:
        return call.form
    layout = call.plan.layout.value
    return call.plan.strategy.value + ("" if layout == "contiguous" else f" {layout}")


@contextmanager
def warnings_of() -> Iterator[list[str]]:
    """What cpcompile warns of inside of the block."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(short(record.getMessage()))

    handler = Collector(logging.WARNING)
    log = logging.getLogger("cpcompile")
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)
