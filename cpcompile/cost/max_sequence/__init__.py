"""The longest sequence that fits."""
