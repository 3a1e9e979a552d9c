"""Plain tensors that meet DTensors count as replicated, but only while compiling.

Note [Mixing plain tensors and DTensors]
While Dynamo traces a model whose inputs are DTensors, plain tensors (positions, masks,
plain parameters) meet DTensors long before a backend is called, and DTensor refuses the
mixture. Its switch for that is process wide and would hide mistakes of programs that
have nothing to do with us, so it is on only from the start to the end of a compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.callback import on_compile_end, on_compile_start
from torch.distributed.tensor import DTensor


@contextmanager
def plain_means_replicated() -> Iterator[None]:
    """See Note [Mixing plain tensors and DTensors]; may be nested."""
    dispatcher = DTensor._op_dispatcher
    before = dispatcher._allow_implicit_replication
    dispatcher._allow_implicit_replication = True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


@functools.cache
def install() -> None:
    """Have every compilation run under `plain_means_replicated`."""
    entered: list[Any] = []

    @on_compile_start  # type: ignore[untyped-decorator]  # torch._dynamo has no types here
    def start(_: Any) -> None:
        context = plain_means_replicated()
        context.__enter__()
        entered.append(context)

    @on_compile_end  # type: ignore[untyped-decorator]
    def end(_: Any) -> None:
        if entered:
            entered.pop().__exit__(None, None, None)
