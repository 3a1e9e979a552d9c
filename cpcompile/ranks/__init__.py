"""The common work of ranks: groups, agreement, shardings and their marks."""
