"""Find the placement of every value of a graph, and shard the graph."""
