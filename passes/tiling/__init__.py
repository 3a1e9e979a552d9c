"""Runs regions of a joint graph tile by tile over the tokens of this rank."""
