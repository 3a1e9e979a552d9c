"""Check cheaply, at compile time, that all ranks compile the same program.

A rank that compiles another graph, with other shapes or options, would wait forever in
a collective that the others never start. So the ranks compare what they are about to
compile, and how each of their attempts to compile it ended. What one rank cannot do, no
rank does: all of them go on with the next attempt, or all raise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Generic, TypeVar

from torch.distributed.distributed_c10d import ProcessGroup

from cpcompile.errors import RankFailedError, RankMismatchError
from cpcompile.ranks.meetings import is_alone, meetings_of
from cpcompile.settings import setting
from cpcompile.torch_private.dynamo import RestartAnalysis, TensorifyState

# How long a rank that has compiled waits for others that still compile: they may have
# to do what it found in a cache. A rank that ends is noticed before.
COMPILE_TIMEOUT_SECONDS = 3600.0

T = TypeVar("T")

# What to do about an item that differs, by how its name begins.
_FIXES = {
    "input": "give every rank the whole tensor, with the same dtype and requires_grad",
    "values": "give every rank the same tokens; other data belongs on another mesh "
    "axis, or on ranks of another group",
    "value of": "give the mask one value on all ranks: load one checkpoint, or write "
    "it alike on every rank before the same call",
    "grad mode": "enter torch.no_grad() or inference_mode() on every rank or on none",
    "autocast": "enter torch.autocast on every rank or on none",
    "training": "call train() or eval() on every rank",
    "cpcompile.config": "set it alike on every rank",
    "version": "install the same packages on every host",
}


@dataclass(frozen=True)
class Message:
    """The message of one rank: `text`, or an error that keeps it from going on.

    final: whether no other way of compilation fixes the error.
    again: whether the error has Dynamo trace again.
    """

    text: str = ""
    error: str | None = None
    final: bool = False
    again: bool = False

    def encoded(self) -> str:
        """Return the message as it goes through the store."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """The outcome of an attempt of all ranks; no rank uses one with a `problem`."""

    made: T | None = None
    problem: Exception | None = None


def check_agreement(
    group: ProcessGroup, description: dict[str, str], doing: str = "compiles a graph"
) -> None:
    """Compare what the ranks of `group` compile, item by item.

    Raises: RankMismatchError, on every rank with the same text, if an item differs, or
    if a rank does not come within config.agreement_timeout_seconds; RankFailedError if
    it came, and cannot go on.
    """
    seconds = setting("agreement_timeout_seconds")
    fix = " (or a larger cpcompile.config.agreement_timeout_seconds)"
    texts = all_gather_text(group, json.dumps(description), doing, seconds, fix)
    _raise_if_they_differ(group, texts)


def attempt(
    group: ProcessGroup,
    make: Callable[[], tuple[T, dict[str, str]]],
    final: tuple[type[Exception], ...],
    doing: str,
) -> Attempt[T]:
    """Run `make`, and use what it makes only if it succeeds on every rank.

    All ranks of the group call it.

    Args:
        make: returns what it made, and what must be the same on every rank, item by
            item.
        final: errors of `make` that no other attempt fixes.
        doing: what the rank does, for errors of others: "compiles forward".

    Raises: RankMismatchError if an item differs, or another rank is gone; an error of
    `make` that is final, or on the other ranks RankFailedError with its text. Dynamo's
    RestartAnalysis only if all ranks raise it: no rank traces again alone.
    """
    fixed = set(TensorifyState.force_specializations)  # by earlier traces of this frame
    try:
        tried = _attempt(group, make, final, doing)
    except RestartAnalysis:
        raise
    except BaseException:
        TensorifyState.clear()
        raise
    if tried.problem is not None:
        # Some ranks may have been about to trace again, with other numbers as constants
        # than the others. What all of them fixed before stays, or the next attempt
        # would have Dynamo trace again for it, and the one after that, without an end.
        TensorifyState.force_specializations &= fixed
    return tried


def _attempt(
    group: ProcessGroup,
    make: Callable[[], tuple[T, dict[str, str]]],
    final: tuple[type[Exception], ...],
    doing: str,
) -> Attempt[T]:
    made: T | None = None
    error: Exception | None = None
    try:
        made, items = make()
        message = Message(json.dumps(items))
    except RankFailedError as failed:  # received in an exchange inside of `make`
        if failed.final:
            raise
        return Attempt(problem=failed)
    except RankMismatchError:  # so do all ranks
        raise
    except Exception as raised:  # the others wait to receive it; it is handed back
        error, again = raised, isinstance(raised, RestartAnalysis)
        is_final = isinstance(raised, final) and not again
        message = Message(error=_text(raised), final=is_final, again=again)
    except BaseException as interrupt:  # nobody has to wait for the user's interrupt
        report_failure(group, interrupt, doing)
        raise
    messages = exchange(group, message, COMPILE_TIMEOUT_SECONDS, doing)
    if error is not None and (message.final or all(m.again for m in messages)):
        raise error
    failed_rank = _failed(group, messages, doing)
    if failed_rank is not None and failed_rank.final:
        raise failed_rank from error
    if message.again:  # not alone
        error = failed_rank or RankMismatchError(
            f"rank {group.rank()} of group {group.group_name!r} {doing}, and has "
            f"to trace it again ({message.error}), which other ranks do not"
        )
    if error is not None or failed_rank is not None:
        return Attempt(problem=error or failed_rank)
    _raise_if_they_differ(group, [m.text for m in messages])
    return Attempt(made)


def all_gather_text(
    group: ProcessGroup,
    text: str,
    doing: str,
    seconds: float = COMPILE_TIMEOUT_SECONDS,
    fix: str = "",
) -> list[str]:
    """Return the texts of all ranks, in rank order; all ranks of the group call it.

    Raises: RankFailedError if one of them cannot go on.
    """
    messages = exchange(group, Message(text), seconds, doing, fix)
    failed = _failed(group, messages, doing)
    if failed is not None:
        raise failed
    return [rank_message.text for rank_message in messages]


def report_failure(group: ProcessGroup, error: BaseException, doing: str) -> None:
    """Tell the ranks that wait for this one that it raises instead of compiling."""
    if not is_alone(group):
        message = Message(error=_text(error), final=True)
        meetings_of(group).tell(doing, message.encoded())


def from_first_rank(group: ProcessGroup, make: Callable[[], str], doing: str) -> str:
    """Return on every rank what `make` returns on the group's first rank.

    Called by all ranks of the group, right after `check_agreement`.

    Raises: what `make` raises; on the other ranks RankFailedError with its text.
    """
    try:
        text = make() if group.rank() == 0 or is_alone(group) else ""
    except Exception as error:  # whatever it is, the other ranks wait to receive it
        report_failure(group, error, doing)
        raise
    return all_gather_text(group, text, doing)[0]


def all_equal(group: ProcessGroup, text: str, doing: str) -> bool:
    """Tell whether `text` is the same on all ranks; all call it, in an `attempt`.

    Raises: RankFailedError if a rank failed instead.
    """
    return set(all_gather_text(group, text, doing)) == {text}


def exchange(
    group: ProcessGroup, message: Message, seconds: float, doing: str, fix: str = ""
) -> list[Message]:
    """Return the messages of all ranks, in rank order; all ranks of the group call it.

    Args:
        message: that of this rank.
        seconds: how long this rank waits for ranks that run.
        doing: what it waits for, for the error: "compiles forward".
        fix: what else helps if it has waited in vain, for the error.

    Raises: RankMismatchError that names the ranks that are gone, or that do not come in
    time, or do something else, or says that the store is gone.
    """
    if is_alone(group):
        return [message]
    texts = meetings_of(group).meet(doing, message.encoded(), seconds, fix)
    return [Message(**json.loads(text)) for text in texts]


def _raise_if_they_differ(group: ProcessGroup, texts: list[str]) -> None:
    """Raise RankMismatchError unless the items of all ranks are the same."""
    if len(set(texts)) > 1:
        raise RankMismatchError(_differences_text(group, list(map(json.loads, texts))))


def _failed(
    group: ProcessGroup, messages: list[Message], doing: str
) -> RankFailedError | None:
    """Return what this rank raises for the errors of others, the final ones first."""
    errors = {
        rank: message
        for rank, message in enumerate(messages)
        if message.error is not None and rank != group.rank()
    }
    if not errors:
        return None
    rank = min(errors, key=lambda r: (not errors[r].final, errors[r].again, r))
    other_ranks = [
        str(r) for r, message in errors.items() if r != rank and not message.again
    ]
    more = f" (nor can rank {', rank '.join(other_ranks)})" if other_ranks else ""
    return RankFailedError(
        f"rank {group.rank()} of group {group.group_name!r} {doing}, and rank {rank} "
        f"cannot{more}: {errors[rank].error}",
        final=errors[rank].final,
    )


def _differences_text(group: ProcessGroup, descriptions: list[dict[str, str]]) -> str:
    differences = _differences(descriptions)
    names = list(differences)
    fixes = [
        text
        for begin, text in _FIXES.items()
        if any(name.startswith(begin) for name in names)
    ]
    needed = "needed the same inputs, shapes, options and settings on every rank"
    return (
        f"the ranks of group {group.group_name!r} compile different programs: "
        + "; ".join(f"{name}: {values}" for name, values in differences.items())
        + "; "
        + ": ".join([needed] + ["; ".join(fixes)] * bool(fixes))
    )


def _differences(descriptions: list[dict[str, str]]) -> dict[str, str]:
    """Return the items that differ, with the first rank of each value."""
    texts = {}
    for item in dict.fromkeys(
        item for description in descriptions for item in description
    ):
        first: dict[str, int] = {}
        for rank, description in enumerate(descriptions):
            first.setdefault(description.get(item, "nothing"), rank)
        if len(first) > 1:
            texts[item] = ", ".join(
                f"rank {rank} has {value}" for value, rank in first.items()
            )
    return texts


def _text(error: BaseException) -> str:
    """Return an error's class and the start of its text, which may be a page."""
    text = f"{type(error).__name__}: {error}".strip().rstrip(":")
    return text if len(text) <= 1000 else f"{text[:1000]} ..."
