"""Rewrite writes into tensors, so that they are right on sharded ones."""
