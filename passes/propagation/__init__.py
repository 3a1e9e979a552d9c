"""Asking DTensor what it would do with a call, and writing its answer."""
