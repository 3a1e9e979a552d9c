"""Replay a graph and its rewritten form, call by call."""
