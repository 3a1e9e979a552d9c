"""Bring calls into one form, which later passes read."""
