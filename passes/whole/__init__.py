"""Passes on the joint graph of the whole sequence, which they make that of a rank."""
