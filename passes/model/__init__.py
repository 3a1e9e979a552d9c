"""Passes on the graph that Dynamo makes of the user's model."""
