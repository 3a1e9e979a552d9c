"""Read masks: from the program that computes one to key ranges and segment ids."""
