"""Ask and fill AOTAutograd's cache under a key of ours.

torch makes no key of a graph whose calls hold a mesh. The key here is a text of ours
for the graph (`graph_text.py`), and torch's own details for all else: inputs, settings
of AOTAutograd and Inductor, passes, versions, devices. An entry has a note of ours.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.fx as fx

# Private, seen in 2.13 and 2.15; where they are gone nothing is kept, see `problem`.
from torch._functorch import config
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch.compiler import config as compiler_config

log = logging.getLogger(__name__)

_USED = (
    (autograd_cache, "AOTAUTOGRAD_CACHE_PREFIX"),
    (autograd_cache, "AOTAutogradCacheDetails"),
    (autograd_cache, "AOTAutogradCachePickler"),
    (autograd_cache, "autograd_cache_key"),
    (autograd_cache, "create_fx_config"),
    (AOTAutogradCache, "_get_tmp_dir_for_key"),
    (AOTAutogradCache, "_lookup"),
    (AOTAutogradCache, "save"),
    (AOTAutogradCache, "try_load"),
    (config, "bundled_autograd_cache"),
)


class NotKept(Exception):
    """The cache has no program under the key."""


def settings() -> dict[str, bool]:
    """Return the settings of AOTAutograd with which programs are kept.

    A program is kept in one piece: Inductor's own cache may have forgotten its parts.
    """
    return {"enable_autograd_cache": True, "bundled_autograd_cache": True}


def is_on() -> bool:
    """Tell whether the user has left torch's caches switched on."""
    off: bool = compiler_config.force_disable_caches
    return bool(config.enable_autograd_cache) and not off


def problem() -> str | None:
    """Say what this torch has changed of what is used here; None if nothing."""
    gone = [name for owner, name in _USED if not hasattr(owner, name)]
    return f"AOTAutograd's cache has no {', '.join(gone)}" if gone else None


@contextmanager
def finding(text: str) -> Iterator[list[Any]]:
    """Load under `text` what is compiled inside; the list gets the note of the entry.

    Raises, from inside: NotKept instead of compiling what is not there.
    """
    lookup, load = AOTAutogradCache._lookup, AOTAutogradCache.try_load
    notes: list[Any] = []

    def noted_lookup(*args: Any, **kwargs: Any) -> Any:
        found = lookup(*args, **kwargs)
        if found is not None:
            notes.append(getattr(found[0], "cpcompile", None))
        return found

    def try_load(*args: Any, **kwargs: Any) -> Any:
        found, aot_config = load(*args, **kwargs)
        if found is None:
            raise NotKept
        return found, aot_config

    with (
        _key_of(text),
        mock.patch.object(AOTAutogradCache, "_lookup", staticmethod(noted_lookup)),
        mock.patch.object(AOTAutogradCache, "try_load", staticmethod(try_load)),
    ):
        yield notes


@contextmanager
def keeping(text: str, note: Callable[[], Any]) -> Iterator[None]:
    """Keep under `text` what is compiled inside, in the place of what is there.

    torch refuses a key or a program silently; then a message is logged.

    note: called when the program is complete; what it returns is kept with it.
    """
    save = AOTAutogradCache.save
    kept: list[str] = []

    def save_noted(key: str, entry: Any, *args: Any, **kwargs: Any) -> None:
        entry.cpcompile = note()
        save(key, entry, *args, **kwargs)
        kept.append(key)

    def not_found(key: str, *_: Any) -> None:
        shutil.rmtree(AOTAutogradCache._get_tmp_dir_for_key(key), ignore_errors=True)

    with (
        _key_of(text),
        mock.patch.object(AOTAutogradCache, "_lookup", staticmethod(not_found)),
        mock.patch.object(AOTAutogradCache, "save", staticmethod(save_noted)),
    ):
        yield
    if not kept:
        log.info(
            "a second start compiles again: AOTAutograd's cache has taken no program; "
            'TORCH_LOGS="+torch._functorch._aot_autograd.autograd_cache" may say why'
        )


@contextmanager
def _key_of(text: str) -> Iterator[None]:
    def key(
        _mod: Any, inputs: Any, aot_config: Any, extra: Any = None, *more: Any
    ) -> tuple[str, list[str]]:
        empty = fx.GraphModule({}, fx.Graph())
        settings = autograd_cache.create_fx_config(extra)
        details = autograd_cache.AOTAutogradCacheDetails(
            empty,
            inputs,
            aot_config,
            settings,
            *more,  # of activations, from torch 2.15 on
        )
        details.cpcompile = text  # type: ignore[attr-defined]
        digest = autograd_cache.AOTAutogradCachePickler(empty).get_hash(details)
        return autograd_cache.AOTAUTOGRAD_CACHE_PREFIX + digest, []

    with mock.patch.object(autograd_cache, "autograd_cache_key", key):
        yield
