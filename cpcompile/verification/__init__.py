"""Whether a model on several ranks computes what one process computes."""
