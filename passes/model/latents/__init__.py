"""Keys and values that every rank makes of something narrower."""
