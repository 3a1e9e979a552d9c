"""Attention calls: found, planned, and replaced by operators."""
