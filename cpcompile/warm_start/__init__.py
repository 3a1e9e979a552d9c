"""Programs that an earlier start of the same model has compiled."""
