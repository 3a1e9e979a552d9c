"""One step of attention on one chunk of keys."""
