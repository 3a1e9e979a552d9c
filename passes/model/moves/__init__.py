"""Calls that move tokens of a sequence, and are shared by moving little."""
