"""Which token lies where."""
