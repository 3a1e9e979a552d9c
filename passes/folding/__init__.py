"""Makes one function of blocks that repeat in a graph of AOTAutograd."""
