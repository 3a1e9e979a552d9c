"""The command `cpcompile`."""
