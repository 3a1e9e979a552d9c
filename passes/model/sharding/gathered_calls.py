"""What is too small for a warning of gathered values, or of repeated work."""

from __future__ import annotations

LEAST_BYTES, LEAST_PART = 2**20, 0.01
"""A line below either limit is not worth a word: this number of bytes, and this part of
the work, or of all bytes that a rank receives."""
