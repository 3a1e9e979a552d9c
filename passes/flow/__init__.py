"""Where a dimension of an operand goes in a call: proofs by DTensor, and tables."""
