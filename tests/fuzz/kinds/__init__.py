"""All kinds of statements; those of a chain of views are in views.STEPS."""

from tests.fuzz.kinds import (
    across,
    attention,
    functions,
    losses,
    modules,
    regions,
    token_wise,
    views,
    writes,
)
from tests.fuzz.site import Kind

# Statements that keep the length, and may stand inside of regions.
INNER: dict[str, Kind] = (
    attention.KINDS
    | modules.KINDS
    | token_wise.KINDS
    | across.KINDS
    | writes.KINDS
    | functions.KINDS
    | views.KINDS
)
OUTER: dict[str, Kind] = INNER | regions.KINDS | regions.BREAK | regions.LENGTH
KINDS: dict[str, Kind] = OUTER | losses.SOURCES | losses.LOSSES
