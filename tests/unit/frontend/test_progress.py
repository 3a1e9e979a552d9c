"""A compilation that takes long says what it is doing, on a terminal or in the log."""

import io
import logging
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from cpcompile.progress import compiling, phase


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "nothing was said"
        time.sleep(0.005)


def test_a_terminal_gets_one_line(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with compiling("forward", after=0.01):
        phase("pass find_attention")
        wait_for(terminal.getvalue)
    first, last = terminal.getvalue().split("\r")[1::][0], terminal.getvalue()
    assert first.rstrip() == (
        "cpcompile: forward has been compiled for 0 s; now: pass find_attention"
    )
    assert last.count("\n") == 1
    assert last.split("\r")[-1].rstrip() == "cpcompile: compiled forward in 0 s"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    outer = compiling("outer", after=0.01)
    with outer, compiling("inner", after=0.0):
        phase("of the inner one")
        wait_for(terminal.getvalue)
    assert "outer" in terminal.getvalue()
    assert "inner has" not in terminal.getvalue()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    try:
        with compiling("forward", after=0.01):
            wait_for(terminal.getvalue)
            raise ValueError
    except ValueError:
        pass
    size = len(terminal.getvalue())
    time.sleep(0.05)
    assert len(terminal.getvalue()) == size


def test_the_log_gets_lines_at_growing_intervals(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    caplog.set_level(logging.INFO, "cpcompile")
    with compiling("forward", after=0.01):
        wait_for(lambda: len(caplog.messages) >= 3)
        took = [r.created for r in caplog.records]
    assert took[2] - took[1] > 1.5 * (took[1] - took[0]) * 0.9
    assert caplog.messages[0].startswith("cpcompile: forward has been compiled for")
    assert sys.stderr.getvalue() == ""


def test_nothing_is_said_of_short_ones_by_other_ranks_and_outside(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with compiling("forward", after=60):
        phase("short")
    phase("outside")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with compiling("forward", after=0.0):
        time.sleep(0.02)
    assert terminal.getvalue() == ""


def test_passes_and_autograd_are_phases(one_rank, monkeypatch):
    found = []
    for module in ("passes.pipeline", "compile.inner_compilers", "compile.assembly"):
        monkeypatch.setattr(f"cpcompile.{module}.phase", found.append)
    x = torch.ones(2, 4, 16, 8)

    def attend(x):
        return F.scaled_dot_product_attention(x, x, x)

    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    options = {"mesh": mesh, "shard": {"x": 2}, "inner": "aot_eager"}
    torch.compile(attend, backend="cp", options=options)(x)
    assert found[0] == "pass inline_attention_modules"
    assert found[-3:] == [
        "pass keep_calls",
        "AOTAutograd, forward and backward",
        "waits for the other ranks",
    ]
