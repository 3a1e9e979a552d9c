"""Context parallelism as a compiler backend: `torch.compile(model, backend="cp")`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpcompile import config, errors
    from cpcompile.apps.checking.check import check
    from cpcompile.apps.verification.verify import verify
    from cpcompile.cost.max_sequence.fit import fit
    from cpcompile.cost.planner import plan
    from cpcompile.frontend.local_view import ContextParallel
    from cpcompile.frontend.sharded_parameters import shard_parameters
    from cpcompile.ops.mixers.mixer import MixerState
    from cpcompile.ops.mixers.registry import register_mixer
    from cpcompile.ranks.local_batches import shard_batch
    from cpcompile.ranks.same_rows import same_rows
    from cpcompile.ranks.sharded_cache import shard_cache
    from cpcompile.ranks.shardings import shard, unshard
    from cpcompile.reporting.explanation import Explanation, explain

__all__ = [
    "ContextParallel",
    "Explanation",
    "MixerState",
    "check",
    "config",
    "errors",
    "explain",
    "fit",
    "plan",
    "register_mixer",
    "same_rows",
    "shard",
    "shard_batch",
    "shard_cache",
    "shard_parameters",
    "unshard",
    "verify",
]

_HOMES = {
    "ContextParallel": "cpcompile.frontend.local_view",
    "Explanation": "cpcompile.reporting.explanation",
    "MixerState": "cpcompile.ops.mixers.mixer",
    "check": "cpcompile.apps.checking.check",
    "explain": "cpcompile.reporting.explanation",
    "fit": "cpcompile.cost.max_sequence.fit",
    "plan": "cpcompile.cost.planner",
    "register_mixer": "cpcompile.ops.mixers.registry",
    "same_rows": "cpcompile.ranks.same_rows",
    "shard_batch": "cpcompile.ranks.local_batches",
    "shard_cache": "cpcompile.ranks.sharded_cache",
    "shard_parameters": "cpcompile.frontend.sharded_parameters",
    "shard": "cpcompile.ranks.shardings",
    "unshard": "cpcompile.ranks.shardings",
    "verify": "cpcompile.apps.verification.verify",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that `import cpcompile` stays light."""
    import importlib  # not needed unless a name is used

    if name in ("config", "errors"):
        return importlib.import_module(f"cpcompile.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'cpcompile' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, imported or not; all other names here are private."""
    return list(__all__)
