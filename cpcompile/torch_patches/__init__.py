"""Everything of torch that is mended or read in private."""
