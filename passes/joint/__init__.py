"""Passes on the joint graph of forward and backward that AOTAutograd makes."""
