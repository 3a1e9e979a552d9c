"""Autograd functions of the user: their graphs without writes, and on rows."""
