"""The placement of every value of a graph."""
