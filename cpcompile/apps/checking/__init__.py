"""Say what would become of a model on several ranks, in one process."""
