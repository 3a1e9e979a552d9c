"""Measurements, on every rank, of what happened when."""
