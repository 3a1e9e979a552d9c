"""Predicts what an attention call costs under each strategy, and chooses one."""
