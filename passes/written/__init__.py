"""Attention that models write out as products and a softmax."""
