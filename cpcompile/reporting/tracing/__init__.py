"""What happened when, measured on every rank."""
