"""Check that all ranks are about to run the same program on the same values."""
