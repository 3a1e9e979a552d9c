"""From the user's call to a graph with named inputs that the ranks agree on."""
