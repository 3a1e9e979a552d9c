"""Ask and fill AOTAutograd's cache, with a text of ours in its key.

torch makes a key of the code of a graph, its inputs, settings, passes, versions and
devices. An entry has a note of ours.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import pathlib
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.fx as fx

# Private, seen in 2.13 and 2.15; where they are gone nothing is kept, see `problem`.
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache
from torch._library.triton import get_triton_kernels_for_op
from torch.compiler import config as compiler_config

from cpcompile.passes.graph.constant_arguments import Method, constant_arguments_of
from cpcompile.torch_private.dynamo import functorch_config
from cpcompile.torch_private.inductor import inductor_config

log = logging.getLogger(__name__)

_USED = (
    (autograd_cache, "check_cacheable"),
    (autograd_cache, "check_node_safe"),
    (AOTAutogradCache, "_get_tmp_dir_for_key"),
    (AOTAutogradCache, "_lookup"),
    (AOTAutogradCache, "save"),
    (AOTAutogradCache, "try_load"),
    (functorch_config, "bundled_autograd_cache"),
    (inductor_config, "unsafe_marked_cacheable_functions"),
    (compiler_config, "cache_key_tag"),
)


class NoKey(Exception):
    """The key of a program would not say all that the program depends on."""


@dataclass(frozen=True)
class ProgramKey:
    """What the key of a program has in addition to what torch puts into it.

    functions: functions of ours that the graph calls, each with a digest of its source.
    """

    text: str
    functions: dict[str, str]

    @classmethod
    def of(cls, gm: fx.GraphModule, text: str, sources: str) -> ProgramKey:
        """Return the key for a graph.

        Raises: NoKey for what torch refuses, or would not look at.
        """
        for graph in _graphs(gm):
            _call_methods_by_name(graph.graph)
        every = _functions(gm)
        key = cls(text, {_name(f): sources for f in every if _is_ours(f)})
        try:
            with _key_of(key):
                _check(gm, every)
        except Exception as error:  # a target that nobody has thought of
            raise NoKey(str(error) or repr(error)) from error
        return key


def _call_methods_by_name(graph: fx.Graph) -> None:
    """Call torch.Tensor.size as .size: torch takes no other form of it for safe."""
    for node in graph.nodes:
        if isinstance(node.target, types.MethodDescriptorType):
            node.op, node.target = "call_method", node.target.__name__


def _functions(gm: fx.GraphModule) -> list[Callable[..., Any]]:
    """Return what a graph calls, also inside of calls of ours."""
    targets = [x.target for g in _graphs(gm) for x in g.graph.nodes]
    called = [f for held in constant_arguments_of(gm) for f in held.functions]
    methods = (Method, types.MethodDescriptorType)
    return [
        x for x in (*targets, *called) if callable(x) and not isinstance(x, methods)
    ]


def _graphs(gm: fx.GraphModule) -> list[fx.GraphModule]:
    inner = [graph for held in constant_arguments_of(gm) for graph in held.graphs]
    modules = [x for graph in (gm, *inner) for x in graph.modules()]
    return [x for x in modules if isinstance(x, fx.GraphModule)]


def _check(gm: fx.GraphModule, functions: list[Callable[..., Any]]) -> None:
    """Raise an error unless torch's key says all of a graph, and of those in it.

    torch looks at the calls of the graph alone, and not at values of its tensors.
    """
    tensors = (*gm.named_parameters(), *gm.named_buffers())
    for name, _ in tensors:
        raise NoKey(f"{name} is a tensor of the graph")
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            raise NoKey(f"{type(module).__name__} is a module")
    for graph in _graphs(gm):
        autograd_cache.check_cacheable(graph)
    for function in functions:
        autograd_cache.check_node_safe(fx.Graph().call_function(function))
    for held in constant_arguments_of(gm):  # whose kernels torch does not look for
        for function in held.functions:
            if _has_triton_kernels(function):
                raise NoKey(f"{function} runs a Triton kernel of the user")


def _has_triton_kernels(function: Any) -> bool:
    if isinstance(function, torch._ops.OpOverloadPacket):
        overloads = (getattr(function, name) for name in function.overloads())
        return any(map(_has_triton_kernels, overloads))
    if not isinstance(function, torch._ops.OpOverload):
        return False
    return bool(get_triton_kernels_for_op(function._schema.name))


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
    return bool(functorch_config.enable_autograd_cache) and not off


def problem() -> str | None:
    """Say what this torch has changed of what is used here; None if nothing."""
    gone = [name for owner, name in _USED if not hasattr(owner, name)]
    return f"AOTAutograd's cache has no {', '.join(gone)}" if gone else None


def _is_ours(function: Callable[..., Any]) -> bool:
    return (getattr(function, "__module__", None) or "").split(".")[0] == "cpcompile"


def _name(function: Callable[..., Any]) -> str:
    """Return the name of a function of ours, under which torch knows it.

    Raises: NoKey if it was made at run time: it may hold anything.
    """
    module = sys.modules[function.__module__]
    if getattr(module, function.__name__, None) is not function:
        raise NoKey(f"{function} was made at run time")
    return f"{function.__module__}.{function.__name__}"


@contextmanager
def finding(key: ProgramKey) -> Iterator[list[Any]]:
    """Load under `key` what is compiled inside; the list gets the note of the entry.

    Raises, from inside: NotKept instead of compiling what is not there.
    """
    lookup, load = AOTAutogradCache._lookup, AOTAutogradCache.try_load
    notes: list[Any] = []

    def noted_lookup(*args: Any, **kwargs: Any) -> Any:
        entry = lookup(*args, **kwargs)
        if entry is not None:
            notes.append(getattr(entry[0], "cpcompile", None))
        return entry

    def try_load(*args: Any, **kwargs: Any) -> Any:
        compiled, aot_config = load(*args, **kwargs)
        if compiled is None:
            raise NotKept
        return compiled, aot_config

    with (
        _key_of(key),
        mock.patch.object(AOTAutogradCache, "_lookup", staticmethod(noted_lookup)),
        mock.patch.object(AOTAutogradCache, "try_load", staticmethod(try_load)),
    ):
        yield notes


@contextmanager
def keeping(key: ProgramKey, note: Callable[[], Any]) -> Iterator[None]:
    """Keep under `key` what is compiled inside, in the place of what is there.

    torch refuses a key or a program silently; then a message is logged.

    note: called when the program is complete; what it returns is kept with it.
    """
    save = AOTAutogradCache.save
    stored_names: list[str] = []

    def save_noted(name: str, entry: Any, *args: Any, **kwargs: Any) -> None:
        entry.cpcompile = note()
        save(name, entry, *args, **kwargs)
        stored_names.append(name)

    def not_found(name: str, *_: Any) -> None:
        shutil.rmtree(AOTAutogradCache._get_tmp_dir_for_key(name), ignore_errors=True)

    with (
        _key_of(key),
        mock.patch.object(AOTAutogradCache, "_lookup", staticmethod(not_found)),
        mock.patch.object(AOTAutogradCache, "save", staticmethod(save_noted)),
    ):
        yield
    if not stored_names:
        log.info(
            "a second start compiles again: AOTAutograd's cache has taken no program; "
            'TORCH_LOGS="+torch._functorch._aot_autograd.autograd_cache" may say why'
        )


@contextmanager
def _key_of(key: ProgramKey) -> Iterator[None]:
    tag = f"{compiler_config.cache_key_tag} {key.text}"
    functions = inductor_config.unsafe_marked_cacheable_functions | key.functions
    with (
        compiler_config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]  # is added at run time
        inductor_config.patch(unsafe_marked_cacheable_functions=functions),
    ):
        yield


@functools.cache
def sources_digest() -> str:
    """Return a digest that changes with each of our sources, for the keys of caches.

    Inductor's cache sees neither our templates nor our order of a graph. A rank with an
    old entry would wait for the others forever.
    """
    digest = hashlib.sha256()
    for path in sources(pathlib.Path(__file__).parents[1]):
        digest.update(path.read_bytes())
    return f"cpcompile {digest.hexdigest()[:16]}"


def sources(package: pathlib.Path) -> list[pathlib.Path]:
    """List our sources, with those of the passes: in a checkout these are a link."""
    folders = (package, package / "passes")
    paths = {p for f in folders for end in ("*.py", "*.jinja") for p in f.rglob(end)}
    return sorted(paths)
