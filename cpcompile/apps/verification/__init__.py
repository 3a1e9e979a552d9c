"""Compare several ranks with one process."""
