"""What ranks do together: groups, agreement, shardings and their marks."""
