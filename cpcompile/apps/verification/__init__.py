"""Comparing several ranks with one process."""
