"""Account for what compiled graphs exchange, and for work that every rank repeats."""
