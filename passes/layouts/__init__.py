"""Which token lies on which rank, decided for the whole graph."""
