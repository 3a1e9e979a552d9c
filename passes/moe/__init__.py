"""Tokens that are routed to experts."""
