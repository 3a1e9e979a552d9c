"""Measures the running machine and group, and writes the profile that "auto" uses."""

from cpcompile.apps.calibration.calibrate import FULL, QUICK, Effort, calibrate
from cpcompile.apps.calibration.command import main

__all__ = ["FULL", "QUICK", "Effort", "calibrate", "main"]
