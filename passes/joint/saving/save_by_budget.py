"""Choose what the forward saves for the backward, so that it fits into a budget.

    saved: x, up, gate, silu, out, lse   ->   saved: x, out, lse
    backward: reads them                      backward: computes the rest again

Runs in the place where AOTAutograd's partitioner chooses. Its own answers are tried,
from the fastest to the smallest: what kernels of the backward can fuse is computed
again first, then all that is cheap per token, then products, first those that give much
memory for their time (a knapsack, as in torch). Attention, messages and tiles are saved
(`kept_values.py`); only if nothing else is left is attention computed again, with its
messages, layer by layer.

Ranks whose parts differ in size may need different choices. They take the choice of the
rank that saves least, so that all send the same messages.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.fx as fx

from cpcompile.errors import OptionError
from cpcompile.logs import warn_once, warn_unmet
from cpcompile.options import Options
from cpcompile.settings import setting
from cpcompile.torch_patches.saved_values import (
    Partitioner,
    is_kept,
    keep,
    let_go,
    offload,
    size_of,
    slowest_to_repeat,
)

from ...graph.nodes import module_path, reached
from .kept_values import break_down, is_attention, is_to_keep, saved_bytes

_STEPS = 32  # of the part of products that is saved


class Choice(NamedTuple):
    """A choice of what is saved; the larger of two choices saves less.

    again: calls of attention and its messages that are computed again.
    stage: index into _STAGES.
    repeated: products that are computed again, as steps of their bytes.
    """

    again: int = 0
    stage: int = 0
    repeated: int = 0


_STAGES = ("fastest", "fused", "cheap", "products")
_LEAST_OFFLOADED = 2**20  # bytes; the latency of a copy is worth more
_PRODUCTS = len(_STAGES) - 1


@dataclass(frozen=True)
class Saved:
    """The record of what one graph saves.

    size: bytes for the backward, beyond inputs. fastest: bytes without a budget.
    budget: its bytes. again: (operator, module path) of the costly calls that the
    backward computes again, attention first. attention: the module paths of attention
    among them. others: the number of cheap calls that it computes again.
    """

    size: int
    fastest: int
    budget: int
    again: tuple[tuple[str, str], ...]
    attention: tuple[str, ...]
    others: int

    def __str__(self) -> str:
        count = Counter(name for name, _ in self.again)
        costly = [f"{n} {x} ({_paths(self.again, x)})" for x, n in count.items()]
        again = ", ".join([*costly, f"{self.others} cheap calls"])
        return (
            f"{_mib(self.size)} of {_mib(self.fastest)} saved for the backward, budget "
            f"{_mib(self.budget)}; computed again there: {again}"
        )


@dataclass(frozen=True)
class SavingBudget:
    """The input of `save_by_budget` in addition to its graph.

    given: a fraction of what torch saves, or bytes above 1; None for no limit.
    offload: whether torch moves what is saved into the memory of the host.
    frame: the name of what is compiled, for messages.
    all_gather_text: gives the texts of all ranks for the text of this rank.
    found: gets what was chosen.
    """

    given: float | None
    frame: str
    all_gather_text: Callable[[str], Sequence[str]] = lambda text: [text]
    offload: bool = False
    found: list[Saved] = field(default_factory=list, compare=False)


def save_by_budget(torchs: Partitioner, ctx: SavingBudget) -> list[fx.Node]:
    """Choose the values that the forward saves for the backward.

    Raises: OptionError if not even the least fits into a number of bytes, with the
    smallest number that does. A fraction counts for each of several graphs, one of
    which may have little to leave out: the least is saved then.
    """
    saved = torchs.fastest() if ctx.given is None else _within(torchs, ctx.given, ctx)
    if ctx.offload:
        for node, size in saved_bytes(torchs.graph, saved).items():
            if size >= _LEAST_OFFLOADED:
                offload(node)
    return saved


def _within(torchs: Partitioner, limit: float, ctx: SavingBudget) -> list[fx.Node]:
    search = _Search(torchs)
    fastest = search.size(search.usual)
    is_bytes = limit > 1
    budget = int(limit if is_bytes else limit * fastest)
    search.protect()
    choice = search.first_within(budget)
    if choice is None and is_bytes:
        raise _too_small(search, ctx, fastest)
    choice = choice or search.least
    choices = [
        Choice(*json.loads(text)) for text in ctx.all_gather_text(json.dumps(choice))
    ]
    saved = search.saved(max(choices))
    ctx.found.append(search.described(saved, fastest, budget))
    return saved


class _Search:
    """Candidates of one graph, from the fastest to the smallest."""

    def __init__(self, torchs: Partitioner) -> None:
        self.torchs = torchs
        self.units: list[fx.Node] = []  # attention and its messages
        self.usual = torchs.fastest()

    def protect(self) -> None:
        """Keep what only a budget that cannot be met otherwise computes again."""
        forward = self.torchs.forward
        nodes = [x for x in self.torchs.graph.nodes if x in forward and is_to_keep(x)]
        for node in nodes:
            if not is_kept(node):
                keep(node)
                if is_attention(node) and is_kept(node):
                    self.units.append(node)

    def size(self, saved: Collection[fx.Node]) -> int:
        """Return the bytes that the forward keeps alive."""
        return sum(saved_bytes(self.torchs.graph, saved).values())

    def saved(self, choice: Choice) -> list[fx.Node]:
        """Return the values that a candidate saves."""
        for node in self.units[: choice.again]:
            let_go(node)
        for node in self.units[choice.again :]:
            keep(node)
        stages = (self.torchs.fastest, self.torchs.fused, self.torchs.cheap)
        if choice.stage < _PRODUCTS:
            return stages[choice.stage]()
        costly = self.torchs.costly()
        total = sum(map(size_of, costly))
        room = total * (_STEPS - choice.repeated) // _STEPS
        slowest = set(slowest_to_repeat(costly, room))
        return self.torchs.with_again([x for x in costly if x not in slowest])

    def fits(self, choice: Choice, budget: int) -> bool:
        return self.size(self.saved(choice)) <= budget

    def first_within(self, budget: int) -> Choice | None:
        """Return the candidate that saves most within so many bytes, or None."""
        for stage in range(_PRODUCTS):
            if self.fits(Choice(0, stage), budget):
                return Choice(0, stage)
        if self.fits(Choice(0, _PRODUCTS, _STEPS), budget):
            return _first(
                [Choice(0, _PRODUCTS, n) for n in range(_STEPS + 1)],
                lambda choice: self.fits(choice, budget),
            )
        with_attention = [
            Choice(n, _PRODUCTS, _STEPS) for n in range(1, len(self.units) + 1)
        ]
        if not with_attention or not self.fits(with_attention[-1], budget):
            return None
        return _first(with_attention, lambda choice: self.fits(choice, budget))

    @property
    def least(self) -> Choice:
        """Candidate that saves least."""
        return Choice(len(self.units), _PRODUCTS, _STEPS)

    def described(self, saved: list[fx.Node], fastest: int, budget: int) -> Saved:
        """Describe `saved`, which was chosen."""
        costly = {*self.torchs.costly(), *self.units}
        again = self._again(saved) - self._again(self.usual)
        attention = [x for x in again if is_attention(x)]
        expensive = sorted(
            again & costly, key=lambda x: (not is_attention(x), x.name, module_path(x))
        )
        return Saved(
            size=self.size(saved),
            fastest=fastest,
            budget=budget,
            again=tuple((_name(x), module_path(x)) for x in expensive),
            attention=tuple(sorted({module_path(x) for x in attention})),
            others=len(again - set(expensive)),
        )

    def _again(self, saved: Collection[fx.Node]) -> set[fx.Node]:
        """Return the calls of the forward that the backward computes from `saved`."""

        backward, forward, kept = self.torchs.backward, self.torchs.forward, {*saved}

        def computed(x: fx.Node) -> bool:
            return x not in kept and x.op == "call_function"

        made = reached(backward, lambda x: [*filter(computed, x.all_input_nodes)])
        return {x for x in forward if x in made}


def _first(choices: list[Choice], fits: Callable[[Choice], bool]) -> Choice:
    """Return the first choice that fits, by bisection.

    The last choice fits, and usually so do those that come after one that fits.
    """
    low, high = 0, len(choices) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(choices[middle]):
            high = middle
        else:
            low = middle + 1
    return choices[high]


def _too_small(search: _Search, ctx: SavingBudget, fastest: int) -> OptionError:
    sizes = saved_bytes(search.torchs.graph, search.saved(search.least))
    least = sum(sizes.values())
    fraction = math.ceil(1000 * least / fastest) / 1000 if fastest else 1.0
    return OptionError(
        f"options['activation_memory']: got {ctx.given!r}; the backward of {ctx.frame} "
        f"needs at least {least} bytes on this rank, {fraction:.3f} of the "
        f"{fastest} that are saved without a budget: {break_down(sizes)}. Needed a "
        "budget of so many bytes or more; or fewer tokens, or more ranks"
    )


def _name(node: fx.Node) -> str:
    return str(node.target).rsplit(".", 1)[0]


def _paths(again: Sequence[tuple[str, str]], name: str) -> str:
    paths = list(dict.fromkeys(path for call_name, path in again if call_name == name))
    more = f", and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def saving_of(
    options: Options,
    device_type: str,
    frame: str,
    all_gather_text: Callable[[str], Sequence[str]],
) -> SavingBudget | None:
    """Return the budget that was asked for; None if nothing was asked for.

    `all_gather_text` gives the texts of all ranks for the text of this rank.

    Raises: OptionError for offloading from a CPU.
    """
    budget, offload = options.activation_memory, setting("offload_activations")
    if offload and device_type == "cpu":
        raise OptionError(
            "cpcompile.config.offload_activations is True on a mesh of device type "
            "'cpu', where what is saved is in the memory of the host already; needed "
            "an accelerator, or False. options['activation_memory'] saves less"
        )
    if budget is None and not offload:
        return None
    return SavingBudget(budget, frame, all_gather_text, offload)


def warn_of_budget(saving: SavingBudget | None) -> None:
    """Warn if attention is computed again, and if a fraction cannot be met."""
    if saving is None:
        return
    for saved in saving.found:
        if saved.size > saved.budget:
            least = f"{saved.size / saved.fastest:.2f}"
            size = f"{saved.size / 2**20:.1f} MiB"
            why = f"{least} ({size}) is the least that can be saved for the backward"
            option = f"options['activation_memory'] = {saving.given:g}"
            warn_unmet(saving.frame, option, why)
        if saved.attention:
            paths = saved.attention
            more = f", and {len(paths) - 3} more" if len(paths) > 3 else ""
            warn_once(
                f"{saving.frame}: the backward computes attention again, with its "
                f"messages, at {', '.join(paths[:3])}{more}: nothing else is left that "
                "options['activation_memory'] of "
                f"{saved.budget / 2**20:.1f} MiB could leave out"
            )
