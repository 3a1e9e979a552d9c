"""The longest sequence that fits: what of a training step takes memory."""
