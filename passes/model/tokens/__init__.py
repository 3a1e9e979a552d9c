"""Find where values of a graph have tokens, and decide what leaves it, and how."""
