"""Measure the running machine and group; write the profile that "auto" uses."""

from cpcompile.apps.calibration.calibrate import FULL, QUICK, Effort, calibrate
from cpcompile.apps.calibration.command import main

__all__ = ["FULL", "QUICK", "Effort", "calibrate", "main"]
