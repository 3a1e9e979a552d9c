"""Writes into tensors."""
