"""What a mask says: from the program that computes it to key ranges and segment ids."""
