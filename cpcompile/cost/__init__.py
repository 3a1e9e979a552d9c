"""Predicts what an attention call costs under each strategy, and chooses one."""

from cpcompile.cost.choose import choose
from cpcompile.cost.hardware import HardwareProfile, load_profile
from cpcompile.cost.selection import profile_for_device

__all__ = ["HardwareProfile", "choose", "load_profile", "profile_for_device"]
