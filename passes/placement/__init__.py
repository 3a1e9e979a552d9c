"""Write placements into a graph: calls that shard, gather and wrap values."""
