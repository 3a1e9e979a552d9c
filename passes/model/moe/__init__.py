"""The dispatch of tokens to experts."""
