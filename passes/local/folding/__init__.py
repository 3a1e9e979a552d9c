"""Blocks that a graph repeats, as calls of one function."""
