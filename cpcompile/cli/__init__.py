"""The command line: cpcompile plan, calibrate, doctor."""
