"""Fill a record with what is measured as it comes, under a progress bar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.progress import Progress, TimeElapsedColumn

# ("step", description) moves the bar on; (name, value) is one more value of the list
# called name in the record.
Event = tuple[str, Any]


def collect(record: dict[str, Any], events: Iterable[Event], steps: int) -> None:
    """Add all values to `record`; `steps` is how many steps there are."""
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
        task = progress.add_task("start", total=steps)
        for kind, value in events:
            if kind == "step":
                progress.update(task, description=value, advance=1)
            else:
                record[kind].append(value)
