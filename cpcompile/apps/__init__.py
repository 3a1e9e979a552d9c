"""What a person runs: commands, calibration, verification."""
