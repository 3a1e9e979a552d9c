"""Context parallelism as a compiler backend: `torch.compile(model, backend="cp")`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpcompile import config
    from cpcompile.cost.planner import plan
    from cpcompile.explanation import Explanation, explain
    from cpcompile.shardings import shard, unshard

__all__ = ["Explanation", "config", "explain", "plan", "shard", "unshard"]

_HOMES = {
    "Explanation": "cpcompile.explanation",
    "explain": "cpcompile.explanation",
    "plan": "cpcompile.cost.planner",
    "shard": "cpcompile.shardings",
    "unshard": "cpcompile.shardings",
}


def __getattr__(name: str) -> Any:
    """Names are imported when first used, so that `import cpcompile` stays light."""
    import importlib  # not needed unless a name is used

    if name == "config":
        return importlib.import_module("cpcompile.config")
    if name not in _HOMES:
        raise AttributeError(f"module 'cpcompile' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
