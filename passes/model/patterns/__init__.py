"""Attention that models write out in other calls."""
