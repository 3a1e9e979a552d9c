"""Masks of attention: read, written as integers per token, or left as they are."""
