"""Compile a rewritten graph to a callable: Inductor, the caches, the edges."""
