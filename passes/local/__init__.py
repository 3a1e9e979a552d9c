"""Passes on the graph of one rank, before Inductor compiles it."""
