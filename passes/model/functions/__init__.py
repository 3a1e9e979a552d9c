"""Autograd functions of the user."""
