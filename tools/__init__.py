"""What a person runs; a regular package, so that no other `tools` comes before it."""
