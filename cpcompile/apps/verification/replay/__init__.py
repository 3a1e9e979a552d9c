"""A graph and its rewritten form, call by call."""
