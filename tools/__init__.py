"""Programs to run by hand; a regular package, so that no other `tools` is found."""
