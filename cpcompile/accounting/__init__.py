"""What compiled graphs exchange, and how much of their work every rank repeats."""
