"""Operators and functions that send tensors between ranks."""
