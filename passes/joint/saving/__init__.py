"""What the forward saves for the backward."""
