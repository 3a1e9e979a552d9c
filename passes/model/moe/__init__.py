"""Fold the dispatch of tokens to experts into one call."""
