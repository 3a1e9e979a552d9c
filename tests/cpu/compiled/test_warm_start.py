"""A second start loads the program that the first has compiled: all ranks, or none.

Starts are in one process here, with all that Dynamo knows forgotten between them; so
nothing but a folder of caches is handed on. Programs are compared bit by bit.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import autograd_cache
from torch._inductor.runtime.runtime_utils import cache_dir
from torch._inductor.utils import fresh_cache
from torch.compiler._cache import CacheArtifactManager

from cpcompile.reporting.graph_report import recording
from tests.cpu.attention_cases import sequence_mesh
from tests.cpu.length_cases import run as run_lengths
from tests.support.bounds import Deviation, Values, check, deviations
from tests.support.forms.repeated_models import Kind, new_model, two_steps
from tests.support.settings import split

ZIGZAG = {"strategy": "ring", "layout": "zigzag"}
HIT, MISS = (1, 0, 0), (0, 1, 1)  # found, not found, kept
DROPPED = (1, 1, 1)  # found, and compiled nevertheless


@contextmanager
def kept() -> Iterator[Path]:
    """The folder of an empty cache of programs; other tests keep none."""
    with fresh_cache(), functorch_config.patch(enable_autograd_cache=True):
        yield Path(cache_dir(), "aotautograd")


@dataclass(frozen=True)
class Start:
    """cache: how often a program was found, not found, and kept."""

    cache: tuple[int, int, int]
    values: Values
    errors: list[Deviation]
    report: list[str]


def start(kind: Kind, options: dict[str, object], layers: int = 1) -> Start:
    torch._dynamo.reset()
    counters.clear()
    model = new_model(kind, layers)
    mesh = sequence_mesh(dist.get_world_size())
    given, settings = split({"mesh": mesh, **options})
    compiled = torch.compile(model, backend="cp", options=given)
    with recording() as reports, settings:
        values = two_steps(compiled, model)
    errors = []
    if not kind.dropout and not kind.attention_dropout:  # other random numbers
        alone = new_model(kind, layers)
        errors = deviations(values, two_steps(alone, alone))
    found = counters["aot_autograd"]
    names = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_saved")
    # A rank that finds no program asks once more when it compiles it.
    hit, miss, saved = (found[name] for name in names)
    accounts = reports[0].accounts
    assert len(accounts) == 2, "a forward and a backward"
    report = [*reports[0].edges(), *map(str, accounts)]
    return Start((hit, min(miss, 1), saved), values, errors, report)


def check_same(first: Start, second: Start) -> None:
    for each in (first, second):
        check(each.errors)
    assert first.report == second.report
    assert first.values.keys() == second.values.keys()
    for name, value in first.values.items():
        torch.testing.assert_close(second.values[name], value, rtol=0, atol=0)


def one_rank_forgets() -> list[Start]:
    """The starts: cold, warm, after rank 1 lost its program, warm again."""
    with kept() as programs:
        starts = [start(Kind(), ZIGZAG), start(Kind(), ZIGZAG)]
        if dist.get_rank() == 1:
            shutil.rmtree(programs)
        return [*starts, start(Kind(), ZIGZAG), start(Kind(), ZIGZAG)]


def test_all_ranks_find_the_program_or_none_does(pools) -> None:
    for rank, starts in enumerate(pools[2].run(one_rank_forgets, timeout=170)):
        cold, warm, lost, again = starts
        for other in (warm, lost, again):
            check_same(cold, other)
        assert (cold.cache, warm.cache, again.cache) == (MISS, HIT, HIT)
        assert lost.cache == (DROPPED if rank == 0 else MISS)


def one_rank_has_an_older_program() -> list[tuple[int, int, int]]:
    with kept() as programs:
        starts = [start(Kind(), ZIGZAG)]
        older = programs.with_name("older")
        shutil.copytree(programs, older)
        shutil.rmtree(programs)
        starts.append(start(Kind(), ZIGZAG))
        if dist.get_rank() == 1:
            shutil.rmtree(programs)
            older.rename(programs)
        starts += [start(Kind(), ZIGZAG), start(Kind(), ZIGZAG)]
        return [each.cache for each in starts]


def test_programs_of_two_compilations_do_not_run_together(pools) -> None:
    """Each rank has a program, and rank 1 one of an earlier compilation."""
    for found in pools[2].run(one_rank_has_an_older_program, timeout=170):
        assert found == [MISS, MISS, DROPPED, HIT]


def another_program(options: dict[str, object]) -> list[tuple[int, int, int]]:
    with kept():
        return [start(Kind(), each).cache for each in (ZIGZAG, ZIGZAG | options)]


OTHERS = {
    "layout": {"layout": "contiguous"},
    "strategy": {"strategy": "all_gather"},
    "unroll": {"unroll": 0},
    "tile": {"tile": 4},
    "memory": {"activation_memory": 0.5},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_another_option_is_another_program(pools, options) -> None:
    for found in pools[2].run(another_program, options, timeout=170):
        assert found == [MISS, MISS]


KINDS = {
    "ulysses": (Kind(rotary=True), {"strategy": "ulysses"}),
    "dropout": (Kind(dropout=0.3), ZIGZAG),
    "tied": (Kind(tied=True), {"strategy": "all_gather"}),
    "checkpointed": (Kind(checkpointed=True), {"strategy": "ring"}),
    "writes": (Kind(writes=True), {"strategy": "all_gather"}),
    "tiles": (Kind(), {"strategy": "ring", "tile": 4}),
    "memory": (Kind(), {"strategy": "ring", "activation_memory": 0.5}),
}


def twice(kind: Kind, options: dict[str, object]) -> list[Start]:
    with kept():
        return [start(kind, options, layers=4) for _ in range(2)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
def test_every_kind_of_program(pools, kind, options) -> None:
    """What tiles, folding and budgets have found is in the second report too."""
    for cold, warm in pools[2].run(twice, kind, options, timeout=390):
        check_same(cold, warm)
        assert (cold.cache, warm.cache) == (MISS, HIT)


def many_lengths(name: str, starts: tuple) -> list[tuple[list[tuple], int]]:
    """The answers of each start, and how many programs it has found."""
    found = []
    with kept():
        for lengths in starts:
            counters.clear()
            answers = run_lengths(name, "plain", "inductor", True, lengths, **ZIGZAG)
            found.append((answers, counters["aot_autograd"]["autograd_cache_hit"]))
    return found


def check_lengths(found: list, programs: list[int]) -> None:
    cold, warm = found
    for answers, _ in found:
        assert [number for number, _, _ in answers] == programs
        for _, _, errors in answers:
            check(errors)
    assert (cold[1], warm[1]) == (0, 0)


def test_symbolic_lengths(pools) -> None:
    """Programs for many lengths are not kept, and are right at every start.

    One program is for multiples of the ranks, and one, with 67 tokens, for all lengths.
    """
    starts = ((64, 32, 67, 128), (32, 128, 67, 64))
    for found in pools[2].run(many_lengths, "attention", starts, timeout=170):
        check_lengths(found, [0, 0, 1, 1])


def test_masks_of_symbolic_lengths(pools) -> None:
    """What masks say of all lengths is a constant of the program."""
    starts = ((67, 64), (33, 90))
    for found in pools[2].run(many_lengths, "padded", starts, timeout=170):
        check_lengths(found, [0, 0])


@torch._dynamo.allow_in_graph
def of_the_user(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


class Opaque(torch.nn.Module):
    """Calls a function whose body nobody looks at."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = of_the_user(x)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(x, x, x, is_causal=True)


@contextmanager
def lines_of_the_log() -> Iterator[list[str]]:
    """What is said of second starts."""
    lines: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        if "second start" in record.getMessage():
            lines.append(record.getMessage())

    handler = logging.Handler()
    handler.emit = emit
    log = logging.getLogger("cpcompile.compile")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


def start_opaque() -> tuple[tuple[int, ...], str]:
    with lines_of_the_log() as lines, kept():
        counters.clear()
        for _ in range(2):
            torch._dynamo.reset()
            options = {"mesh": sequence_mesh(2), "shard": {"x": 2}}
            compiled = torch.compile(Opaque(), backend="cp", options=options)
            compiled(torch.ones(1, 2, 64, 8))
    found = counters["aot_autograd"]
    return (found["autograd_cache_hit"], found["autograd_cache_saved"]), lines[0]


def test_what_has_no_text_is_compiled_again(pools) -> None:
    for counted, line in pools[2].run(start_opaque, timeout=80):
        assert counted == (0, 0)
        assert "a second start compiles again" in line
        assert "of_the_user" in line


def start_without_a_key() -> tuple[Start, list[str]]:
    """As with a torch that asks for keys in another way."""
    bypass = autograd_cache.BypassAOTAutogradCache("no key")
    with (
        lines_of_the_log() as lines,
        kept(),
        mock.patch.object(
            autograd_cache, "AOTAutogradCacheDetails", mock.Mock(side_effect=bypass)
        ),
    ):
        return start(Kind(), ZIGZAG), lines


def test_the_log_says_where_torch_keeps_nothing(pools) -> None:
    for found, lines in pools[2].run(start_without_a_key, timeout=90):
        check(found.errors)
        assert found.cache[2] == 0
        (line,) = lines
        assert "AOTAutograd's cache has taken no program" in line


def on_another_machine() -> list[Start]:
    CacheArtifactManager.clear()  # what other tests have compiled in this process
    with kept():
        cold = start(Kind(), ZIGZAG)
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None, "nothing was compiled"
    with kept():
        torch.compiler.load_cache_artifacts(saved[0])
        return [cold, start(Kind(), ZIGZAG)]


def test_what_was_saved_is_found_in_an_empty_cache(pools) -> None:
    """By torch.compiler.save_cache_artifacts, as for a machine that starts later."""
    for cold, warm in pools[2].run(on_another_machine, timeout=175):
        check_same(cold, warm)
        assert (cold.cache, warm.cache) == (MISS, HIT)
