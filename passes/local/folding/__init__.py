"""Fold blocks that a graph repeats into calls of one function."""
