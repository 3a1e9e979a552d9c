"""Reports of what was decided, for users: explanations, tables, JSON and pictures."""
