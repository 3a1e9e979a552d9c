"""One step of attention on one chunk of keys, on every kind of kernel."""
