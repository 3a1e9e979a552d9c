"""What the forward keeps for the backward, on the graphs of AOTAutograd."""
