"""Choose what the forward saves for the backward."""
