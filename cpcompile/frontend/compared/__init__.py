"""What the ranks compare: before they compile, when they have, and as they run."""
