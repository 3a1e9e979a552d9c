"""Tell what torch refuses from our own mistakes, wherever an attempt has a fallback.

    try:
        result = call(*args)
    except Exception as error:  # whatever DTensor's rules raise
        check_refusal(error, "linear on shards")
        return None  # the fallback

Note [Refusals and mistakes]
Whether DTensor can do a call is found out by trying, and its rules say no by whatever
they raise. So an attempt catches every error, and a mistake of ours in it would never
be seen: a call would run on gathered tensors, or a proof would be missing. An error is
a refusal if it is of one of cpcompile's own classes, or comes out of torch as an error
that says that something cannot be done, or out of any other code: the user's, a
library's. What Python raises in a line of ours or of torch for a wrong program (a name,
an attribute or a key that is not there, a call with wrong arguments) is a mistake; so
is all else that a line of ours raises, such as an assertion, except for the errors of
torch's C++, which has no lines. A mistake has the same fallback, and is counted and
logged; the tests set `raises_mistakes`.
"""

from __future__ import annotations

import traceback

from cpcompile.logs import warn_once

COUNTER = "mistakes"  # in torch._dynamo.utils.counters["cpcompile"]
raises_mistakes = False
"""Whether a mistake is raised instead of the fallback that there is for it."""

# What Python raises for a program that is wrong.
_OF_PYTHON = (
    AttributeError, ImportError, KeyError, NameError, RecursionError, TypeError,
)  # fmt: skip
# What torch's C++ raises for a call, whose last frame is then the caller's.
_OF_TORCH = (NotImplementedError, RuntimeError)


def check_refusal(error: Exception, attempt: str) -> None:
    """Count, log and, in tests, raise an error unless it is a refusal.

    Args:
        attempt: what failed, in words for the log.
    """
    if is_refusal(error):
        return
    from cpcompile.torch_private.dynamo import counters  # slow to import

    counters["cpcompile"][COUNTER] += 1
    if raises_mistakes:
        raise error
    lines = "".join(traceback.format_exception(error)).rstrip()
    warn_once(
        f"{attempt} failed by a mistake in cpcompile. Results are right, and may take "
        f"longer to compute; please report it:\n{lines}"
    )


def is_refusal(error: Exception) -> bool:
    """Tell whether an error is a refusal, no mistake; Note [Refusals and mistakes]."""
    if _package(type(error).__module__) == "cpcompile":
        return True
    package = _raised_in(error)
    if isinstance(error, _OF_PYTHON):
        return package not in ("cpcompile", "torch")
    return isinstance(error, _OF_TORCH) or package != "cpcompile"


def _raised_in(error: Exception) -> str:
    """Name the package whose line ran last; for C++ it is the caller's."""
    place = error.__traceback__
    if place is None:
        return ""
    while place.tb_next is not None:
        place = place.tb_next
    return _package(str(place.tb_frame.f_globals.get("__name__")))


def _package(module: str) -> str:
    return module.partition(".")[0]
