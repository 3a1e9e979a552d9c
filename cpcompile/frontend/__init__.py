"""Turn the user's call into a graph with named inputs that the ranks agree on."""
