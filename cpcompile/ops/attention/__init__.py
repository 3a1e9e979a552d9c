"""The attention operators, one per strategy, with their DTensor rules."""
