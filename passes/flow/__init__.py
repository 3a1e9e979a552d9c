"""Tell where a dimension of an operand goes in a call, by proofs and by tables.

DTensor gives the proofs.
"""
