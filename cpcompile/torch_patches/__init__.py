"""Fixes of torch, and uses of its private interfaces."""
