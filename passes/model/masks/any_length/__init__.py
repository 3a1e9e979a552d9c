"""Masks of a symbolic length."""
