"""Functions that mix tokens and are no attention: kept whole, and shared out."""
