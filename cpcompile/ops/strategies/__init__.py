"""One operator per strategy."""
