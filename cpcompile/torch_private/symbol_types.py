"""Hand on how symbols of sizes are told apart, by what they stand for."""

# Functions of sizes; seen in 2.11 to 2.15.
from torch.utils._sympy.functions import Max, Mod

# Symbols of numbers and of sizes; seen in 2.11 to 2.15.
from torch.utils._sympy.symbol import SymT, symbol_is_type

__all__ = [
    "Max",
    "Mod",
    "SymT",
    "symbol_is_type",
]
