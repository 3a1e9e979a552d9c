"""Predicts what an attention call costs under each strategy, and chooses one."""

from cpcompile.cost.choose import choose

__all__ = ["choose"]
