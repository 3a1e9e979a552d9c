"""Predict what an attention call costs under each strategy, and choose one."""
