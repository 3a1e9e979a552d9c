"""Rewrite writes into tensors as calls, so that passes see who reads what."""
