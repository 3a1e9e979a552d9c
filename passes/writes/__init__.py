"""Writes into tensors: made functional, done in parts, or refused."""
