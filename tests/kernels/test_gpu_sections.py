"""Sections of `tools.gpu`: failures are rows, and time is kept and taken."""

import os
import time
from dataclasses import dataclass

import torch

from tools.gpu import sections, timing
from tools.gpu.sections import Mode, Section, run_section


@dataclass(frozen=True)
class Work:
    """An item that does what its name says."""

    name: str

    def run(self, mode: Mode) -> list[dict]:
        match self.name:
            case "crashes":
                os._exit(7)
            case "raises":
                raise ValueError("no such kernel")
            case "hangs":
                time.sleep(1000)
        return [{"pid": os.getpid()}]

    def __str__(self) -> str:
        return self.name


def plan_failures(mode: Mode) -> list[Work]:
    return [Work(name) for name in ("raises", "crashes", "works", "works too")]


def plan_hang(mode: Mode) -> list[Work]:
    return [Work("hangs"), Work("too late")]


def test_failures_of_items_are_rows():
    section = Section("x", "", 1.0, 1, plan_failures, {"OMP_NUM_THREADS": "1"})
    rows = []
    assert run_section(section, Mode("cpu"), 100.0, rows.append) == []
    assert [row["item"] for row in rows] == [str(x) for x in plan_failures(Mode())]
    assert "ValueError: no such kernel" in rows[0]["error"]
    assert rows[1]["error"] == "the process ended with exit code 7"
    assert rows[2]["pid"] == rows[3]["pid"] != os.getpid()


def test_what_takes_too_long_is_ended_and_the_rest_is_named(monkeypatch):
    monkeypatch.setattr(sections, "GRACE_SECONDS", 0.3)
    rows = []
    section = Section("x", "", 1.0, 1, plan_hang)
    assert run_section(section, Mode("cpu"), 0.2, rows.append) == ["too late"]
    assert [row["item"] for row in rows] == ["hangs"]
    assert "no result" in rows[0]["error"]
    assert run_section(section, Mode("cpu"), 0.0, rows.append) == ["hangs", "too late"]


def test_interleaved_leaves_out_what_fails():
    def fails():
        raise RuntimeError("no kernel image")

    calls = []
    functions = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = timing.interleaved(functions | {"c": fails}, Mode("cpu"), 0.0)
    assert set(times.milliseconds) == {"a", "b"} == set(times.spread)
    assert times.errors == {"c": "RuntimeError: no kernel image"}
    assert times.rounds == timing.FEWEST_ROUNDS
    assert calls == ["a", "a", "b", "b", *["a", "b"] * times.rounds]


def test_gpu_samples_are_times_between_events(monkeypatch):
    """The host has its head start, then the events enclose the call alone."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, stop):
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(cycles))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(timing, "_buffers", [torch.ones(4)])
    times = timing.interleaved({"a": lambda: log.append("call")}, Mode(), 0.0)
    assert times.milliseconds == {"a": 1.5} and times.spread == {"a": 0.0}
    assert log[:4] == ["call", "wait"] * 2
    assert log[5:9] == ["event", "call", "event", "wait"] and log[4] >= 4e5
    assert not timing._buffers[0].any()
