"""Measured rates of machines."""
