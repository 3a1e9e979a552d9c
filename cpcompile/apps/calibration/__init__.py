"""Measure the running machine and group; write the profile that "auto" uses."""

from cpcompile.apps.calibration.calibrate import FULL, QUICK, calibrate, main
from cpcompile.apps.calibration.measure import Effort

__all__ = ["FULL", "QUICK", "Effort", "calibrate", "main"]
