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
from tests.cpu.against_one_process import warnings
from tests.cpu.attention_cases import compiled_on, sequence_mesh
from tests.cpu.compiled.test_repeated_blocks import KINDS as OF_BLOCKS
from tests.cpu.length_cases import check as check_lengths
from tests.cpu.length_cases import run as run_lengths
from tests.cpu.on_ranks import on_ranks
from tests.support.bounds import Values, check, deviations
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
    report: list[str]


def start(kind: Kind, options: dict[str, object], layers: int = 1) -> Start:
    """Two steps, which are compared with one process."""
    torch._dynamo.reset()
    counters.clear()
    model = new_model(kind, layers)
    mesh = sequence_mesh(dist.get_world_size())
    given, settings = split({"mesh": mesh, **options})
    compiled = torch.compile(model, backend="cp", options=given)
    with recording() as reports, settings:
        values = two_steps(compiled, model)
    if not kind.dropout and not kind.attention_dropout:  # other random numbers
        alone = new_model(kind, layers)
        check(deviations(values, two_steps(alone, alone)))
    found = counters["aot_autograd"]
    names = ("autograd_cache_hit", "autograd_cache_miss", "autograd_cache_saved")
    # A rank that finds no program asks once more when it compiles it.
    hit, miss, saved = (found[name] for name in names)
    accounts = reports[0].accounts
    assert len(accounts) == 2, "a forward and a backward"
    report = [*reports[0].edges(), *map(str, accounts)]
    return Start((hit, min(miss, 1), saved), values, report)


def check_same(first: Start, second: Start) -> None:
    assert first.report == second.report
    torch.testing.assert_close(second.values, first.values, rtol=0, atol=0)


@on_ranks(2)
def test_all_ranks_find_the_program_or_none_does():
    """Cold, warm, after rank 1 lost its program, warm again."""
    with kept() as programs:
        cold, warm = start(Kind(), ZIGZAG), start(Kind(), ZIGZAG)
        if dist.get_rank() == 1:
            shutil.rmtree(programs)
        lost, again = start(Kind(), ZIGZAG), start(Kind(), ZIGZAG)
    for other in (warm, lost, again):
        check_same(cold, other)
    assert (cold.cache, warm.cache, again.cache) == (MISS, HIT, HIT)
    assert lost.cache == (DROPPED if dist.get_rank() == 0 else MISS)


@on_ranks(2)
def test_programs_of_two_compilations_do_not_run_together():
    """Each rank has a program, and rank 1 one of an earlier compilation."""
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
    assert [each.cache for each in starts] == [MISS, MISS, DROPPED, HIT]


OTHERS = {
    "layout": {"layout": "contiguous"},
    "strategy": {"strategy": "all_gather"},
    "unroll": {"unroll": 0},
    "tile": {"tile": 4},
    "memory": {"activation_memory": 0.5},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
@on_ranks(2)
def test_another_option_is_another_program(options):
    with kept():
        starts = [start(Kind(), each) for each in (ZIGZAG, ZIGZAG | options)]
    assert [each.cache for each in starts] == [MISS, MISS]


SOME = ("ulysses", "dropout", "tied", "checkpointed", "writes", "tiles")
KINDS = {name: OF_BLOCKS[name] for name in SOME}
KINDS["memory"] = (Kind(), {"strategy": "ring", "activation_memory": 0.5})


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "options"), KINDS.values(), ids=KINDS)
@on_ranks(2, timeout=390)
def test_every_kind_of_program(kind, options):
    """What tiles, folding and budgets have found is in the second report too."""
    with kept():
        cold, warm = (start(kind, options, layers=4) for _ in range(2))
    check_same(cold, warm)
    assert (cold.cache, warm.cache) == (MISS, HIT)


# One program is for multiples of the ranks, and one, with 67 tokens, for all lengths.
# What masks say of all lengths is a constant of the program.
LENGTHS = {
    "attention": (((64, 32, 67, 128), (32, 128, 67, 64)), [0, 0, 1, 1]),
    "padded": (((67, 64), (33, 90)), [0, 0]),
}


@pytest.mark.parametrize("name", LENGTHS)
@on_ranks(2)
def test_symbolic_lengths(name):
    """Programs for many lengths are not kept, and are right at every start."""
    starts, programs = LENGTHS[name]
    with kept():
        for lengths in starts:
            counters.clear()
            found = run_lengths(name, "plain", "inductor", True, lengths, **ZIGZAG)
            check_lengths([found], programs)
            assert counters["aot_autograd"]["autograd_cache_hit"] == 0


@torch._dynamo.allow_in_graph
def of_the_user(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


class Opaque(torch.nn.Module):
    """Calls a function whose body nobody looks at."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = of_the_user(x)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(x, x, x, is_causal=True)


@on_ranks(2)
def test_what_has_no_text_is_compiled_again() -> None:
    with warnings(logging.INFO) as lines, kept():
        counters.clear()
        for _ in range(2):
            torch._dynamo.reset()
            compiled = compiled_on(2, Opaque(), inner="inductor", shard={"x": 2})
            compiled(torch.ones(1, 2, 64, 8))
    found = counters["aot_autograd"]
    counted = (found["autograd_cache_hit"], found["autograd_cache_saved"])
    line = next(x for x in lines if "second start" in x)
    assert counted == (0, 0)
    assert "a second start compiles again" in line
    assert "of_the_user" in line


@on_ranks(2)
def test_the_log_says_where_torch_keeps_nothing() -> None:
    """As with a torch that asks for keys in another way."""
    bypass = autograd_cache.BypassAOTAutogradCache("no key")
    with (
        warnings(logging.INFO) as lines,
        kept(),
        mock.patch.object(
            autograd_cache, "AOTAutogradCacheDetails", mock.Mock(side_effect=bypass)
        ),
    ):
        found = start(Kind(), ZIGZAG)
    assert found.cache[2] == 0
    (line,) = [x for x in lines if "second start" in x]
    assert "AOTAutograd's cache has taken no program" in line


@on_ranks(2, timeout=175)
def test_what_was_saved_is_found_in_an_empty_cache() -> None:
    """By torch.compiler.save_cache_artifacts, as for a machine that starts later."""
    CacheArtifactManager.clear()  # what other tests have compiled in this process
    with kept():
        cold = start(Kind(), ZIGZAG)
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None, "nothing was compiled"
    with kept():
        torch.compiler.load_cache_artifacts(saved[0])
        warm = start(Kind(), ZIGZAG)
    check_same(cold, warm)
    assert (cold.cache, warm.cache) == (MISS, HIT)
